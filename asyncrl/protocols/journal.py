"""Where the queue's journal keeps what it must not forget: ids and places in one file, payloads in others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol


class Place(NamedTuple):
    """Where a payload lies: `size` bytes of it (without its record's header), whose CRC-32 is `checksum`."""

    segment: int
    offset: int
    size: int
    checksum: int


class JournalEntry(NamedTuple):
    """An accepted, unsettled message. `ticket`: its place in the order of acceptance, over all topics."""

    ticket: int
    topic: str
    message_id: str
    group_id: str
    place: Place


class JournalIndex(Protocol):
    """The journal's entries, in a file that makes several changes one. Changes are remembered here; the owner of the file writes
    them together with what else it has to write: after a crash all of it is there, or none."""

    def add(self, entries: Sequence[JournalEntry]) -> None:
        """These messages are accepted; their payloads are written already."""

    def remove(self, tickets: Iterable[int]) -> None:
        """These are settled."""

    def move(self, places: Sequence[tuple[int, Place]]) -> None:
        """These tickets' payloads lie elsewhere now."""

    def mark_taken(self, topic: str, ticket: int) -> None:
        """Messages of this topic are taken up to and with this ticket: a topic is taken from in the order of acceptance. Need not
        be in the file at once."""

    def entries(self) -> list[JournalEntry]:
        """What the file holds, in order of acceptance."""

    def taken(self) -> Mapping[str, int]:
        """What the file holds, by topic."""
