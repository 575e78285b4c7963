"""What a topic is made of: its specification, stored messages, counts and figures. Plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

from asyncrl.transport.blocks import Payload

MessageState = Literal["accepted", "taken", "returned"]
Session = bytes  # one life of one sender or receiver
LIFE_BITS = 32
"""A broker numbers messages and deliveries from its life << LIFE_BITS on, so that what was meant for an earlier one is not taken
for its own."""


@dataclass(frozen=True)
class TopicSpec:
    """What the queue is told of a topic. `producers`: every name that must close before the topic ends (none: it never ends)."""

    name: str
    capacity_items: int
    capacity_bytes: int
    producers: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.capacity_items >= 1, "a topic holds at least one item"
        assert self.capacity_bytes >= 1, "a topic holds at least one byte"


@dataclass(slots=True)
class Stored:
    """An accepted message. `sequence`: its place in the order of acceptance; `holder`: who has it on lease; `size`: bytes of its
    payload, which may lie in the journal alone (None here); `ticket`: the journal's, 0 where it is not in there."""

    sequence: int
    message_id: str
    group_id: str
    payload: Payload | None
    size: int
    state: MessageState = "accepted"
    holder: Session | None = None
    redelivered: bool = False
    ticket: int = 0


class Incoming(NamedTuple):
    """A message as its sender wrote it."""

    message_id: str
    group_id: str
    payload: Payload


Written = tuple[str, str, Payload]  # an Incoming, or as much: (message id, group id, payload)


class Progress(NamedTuple):
    """A sender's counts: messages announced, granted, handled so far; handled ≤ granted ≤ announced."""

    announced: int
    granted: int
    handled: int


@dataclass
class Acceptance:
    """What became of one write: (message_id, group_id) of the accepted, how many duplicates, (number, reason) of the refused.
    `out_of_turn`: the write, or its tail, came without credit or left a gap, and was ignored."""

    accepted: list[tuple[str, str]] = field(default_factory=list)
    duplicates: int = 0
    refused: list[tuple[int, str]] = field(default_factory=list)
    out_of_turn: bool = False


@dataclass
class TopicStats:
    """Figures of one topic. waiting: announced messages without credit; depth and bytes: accepted, never yet taken messages;
    held: on lease; returned: waiting to be delivered again; blocked_seconds: summed over senders, time with an announced message
    without credit; the rates are those since the first acceptance; the rest are totals."""

    waiting: int = 0
    depth: int = 0
    max_depth: int = 0
    bytes: int = 0
    max_bytes: int = 0
    held: int = 0
    returned: int = 0
    accepted: int = 0
    accepted_bytes: int = 0
    accepted_per_second: float = 0.0
    bytes_per_second: float = 0.0
    taken: int = 0
    settled: int = 0
    redelivered: int = 0
    duplicates: int = 0
    refused: int = 0
    blocked_seconds: float = 0.0
    leases_ended: int = 0

    def to_mapping(self) -> dict[str, float]:
        return asdict(self)
