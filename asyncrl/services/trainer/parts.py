"""What a trainer is made of, given to it by the wiring."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.messages import ScoredGroup
from asyncrl.protocols import LedgerClient, Receiver, Tracker, TrainingEngine, WeightPublisher
from asyncrl.services.service import AddressBook


class RunBlocking(Protocol):
    """Runs a blocking call off the event loop: `asyncio.to_thread`, or the simulator's stand-in."""

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]: ...


@dataclass(frozen=True)
class LeaderParts:
    """Rank 0's alone. `receiver` takes from topic `scored`. `evaluations(name)`: that metric of the evaluations so far, by step
    (may raise TransportError); without it checkpoint.best cannot name one of evaluation. `probes`: what each server answers to
    fixed prompts, by name; without it servers and trainer are not compared."""

    receiver: Receiver
    ledger: LedgerClient
    tracker: Tracker
    evaluations: Callable[[str], Awaitable[Mapping[int, float]]] | None = None
    probes: Callable[[], Awaitable[Mapping[str, Sequence[ScoredGroup]]]] | None = None


@dataclass(frozen=True)
class TrainerParts:
    """`leader` is None on every rank but 0. `closers` end what the wiring opened for these parts (clients), after the parts."""

    publisher: WeightPublisher
    leader: LeaderParts | None = None
    closers: tuple[Callable[[], Awaitable[None]], ...] = field(default=())


Connect = Callable[[AddressBook, TrainingEngine], Awaitable[TrainerParts]]
"""Makes the parts once every service's address and this rank's engine are there. Called on the event loop."""
