"""The two ends of a topic of the bounded queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.messages import ScoredGroup, Trajectory

Message = Trajectory | ScoredGroup


@dataclass(frozen=True)
class Delivery:
    """A message that this receiver has taken. `redelivered`: an earlier holder's lease ended."""

    message: Message
    redelivered: bool = False


class Sender(Protocol):
    """A producer of one topic. Messages of one sender are delivered in the order they were sent."""

    async def send(self, messages: Sequence[Message]) -> None:
        """Return when every message is accepted; wait while the topic is full, in items or in bytes.

        Raises MessageTooLarge for a message that the whole topic could not hold, DeadlineExceeded when the queue is silent.
        """

    async def close(self) -> None:
        """End of this sender's stream. A topic ends when every sender that it was told of has closed."""


class Receiver(Protocol):
    """A consumer of one topic."""

    async def receive(self, *, max_items: int, timeout: float) -> list[Delivery]:
        """Take up to `max_items` messages: at once what is there, else the first to come; [] when `timeout` seconds pass.

        Raises StreamClosed when the topic has ended and everything in it was taken.
        """

    async def settle(self, ids: Sequence[str]) -> None:
        """These messages (text ids) are done with and gone; those of the pipeline's topics are settled by the ledger."""

    async def close(self) -> None:
        """Give the leases back: what was taken and not settled is delivered again."""
