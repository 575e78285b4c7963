"""The journal as the Exchange uses it.

In one wake-up:  append, settle, retain … ─▶ `write` ─▶ the rows' transaction (whoever owns their file) ─▶ `written`

Invariants:
- a message's row is in the file only when its payload is in a segment, and a segment is deleted only when no row in the file
  names it: whenever the process dies, every row has its payload;
- recovery gives what was accepted and is neither settled nor retained, in the order of acceptance, each once;
- what lies on the disk is at most 1 / SPARSE of what is unsettled, the segment that is written to, and what one more write will
  begin to clear away.

Retained: a scored group whose end a checkpoint does not hold yet. It is delivered no more, but should the trainer be set back it
is needed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from asyncrl.protocols.journal import JournalEntry, JournalIndex, Place
from asyncrl.transport.blocks import Payload
from asyncrl.transport.journal.segments import HEADER_BYTES, Segments, WrongRecord
from asyncrl.transport.records import Incoming

SPARSE = 0.25
"""A full segment of which a smaller share is still needed is copied and deleted: it costs a third of a write at most."""

log = logging.getLogger(__name__)


Fate = Literal["deliver", "retain", "drop"]


class Recovered(NamedTuple):
    """A message that an earlier process accepted. `taken`: it was delivered, perhaps; its payload is fetched by `read`."""

    ticket: int
    topic: str
    message_id: str
    group_id: str
    size: int
    taken: bool


class Lost(NamedTuple):
    """A message whose record turned out to be wrong, and how. Its row goes with the next transaction."""

    topic: str
    message_id: str
    group_id: str
    taken: bool
    reason: str


class Journal(Protocol):
    """What the Exchange tells the journal. A ticket stands for a message from its acceptance to its settlement."""

    keeps: bool
    """Payloads can be read back: memory need not hold what is taken."""

    def append(self, topic: str, messages: Sequence[Incoming]) -> Sequence[int]:
        """These are accepted, in this order; their tickets."""

    def settle(self, tickets: Iterable[int]) -> None:
        """These are done with."""

    def retain(self, group_id: str, tickets: Iterable[int]) -> None:
        """These are delivered no more, but kept until `release` of the group."""

    def release(self, group_ids: Iterable[str]) -> None:
        """What was retained of these groups is done with."""

    def mark_taken(self, topic: str, ticket: int) -> None:
        """Messages of this topic up to and with this ticket were delivered."""

    def write(self) -> None:
        """Payloads to the disk, rows to the index; the rows' transaction must follow. Raises StorageFailed."""

    def written(self) -> None:
        """The transaction stands."""

    def read(self, ticket: int) -> Payload:
        """The payload. Raises WrongRecord."""


class NoJournal:
    """Nothing survives (durability none)."""

    keeps = False

    def append(self, topic: str, messages: Sequence[Incoming]) -> Sequence[int]:
        return [0] * len(messages)

    def settle(self, tickets: Iterable[int]) -> None:
        pass

    def retain(self, group_id: str, tickets: Iterable[int]) -> None:
        pass

    def release(self, group_ids: Iterable[str]) -> None:
        pass

    def mark_taken(self, topic: str, ticket: int) -> None:
        pass

    def write(self) -> None:
        pass

    def written(self) -> None:
        pass

    def read(self, ticket: int) -> Payload:
        raise AssertionError("nothing was kept")


@dataclass(slots=True)
class _Waiting:
    topic: str
    message: Incoming


class SegmentJournal:
    """Payloads in `segments`, rows in `index`. First comes `open`, then `recover`, each once."""

    keeps = True

    def __init__(self, segments: Segments, index: JournalIndex):
        self.segments, self._index = segments, index
        self._next_ticket = 1
        self._waiting: dict[int, _Waiting] = {}  # appended and not written yet
        self._places: dict[int, Place] = {}
        self._tickets: dict[int, set[int]] = {}  # segment → tickets that lie in it
        self._live_bytes: dict[int, int] = {}
        self._total_bytes: dict[int, int] = {}
        self._retained: dict[str, list[int]] = {}
        self._found: dict[int, JournalEntry] = {}
        self._taken: dict[str, int] = {}
        self._emptied: set[int] = set()
        self._wrong: set[int] = set()  # segments that hold a wrong record: not copied
        self._freed_bytes = 0  # since segments were last looked through
        self.num_lost = 0

    def open(self) -> tuple[list[JournalEntry], list[Lost]]:
        """What an earlier process left, in the order of acceptance: what is whole, and what turned out to be wrong. Files that no
        row names are deleted."""
        lost: list[Lost] = []
        taken = self._taken = dict(self._index.taken())
        self._next_ticket = max([0, *taken.values()]) + 1
        for entry in self._index.entries():
            ticket, topic, message_id, group_id, place = entry
            self._next_ticket = max(self._next_ticket, ticket + 1)
            try:
                self.segments.read(place)
            except WrongRecord as error:
                lost.append(Lost(topic, message_id, group_id, ticket <= taken.get(topic, 0), str(error)))
                self._index.remove((ticket,))
                log.error("the queue's journal lost %s of topic %s: %s", message_id, topic, error)
            else:
                self._stand(ticket, place)
                self._found[ticket] = entry
        self.num_lost += len(lost)
        self.segments.drop(segment for segment in self.segments.found if segment not in self._tickets)
        return list(self._found.values()), lost

    def recover(self, fate: Callable[[str, str], Fate]) -> list[Recovered]:
        """What is to be delivered of what `open` found, in the order of acceptance; `fate(topic, group_id)` says what is not."""
        recovered: list[Recovered] = []
        for ticket, topic, message_id, group_id, place in self._found.values():
            match fate(topic, group_id):
                case "deliver":
                    recovered.append(
                        Recovered(ticket, topic, message_id, group_id, place.size, ticket <= self._taken.get(topic, 0))
                    )
                case "retain":
                    self.retain(group_id, (ticket,))
                case "drop":
                    self.settle((ticket,))
        self._found.clear()
        return recovered

    def append(self, topic: str, messages: Sequence[Incoming]) -> Sequence[int]:
        first = self._next_ticket
        self._next_ticket += len(messages)
        tickets = range(first, self._next_ticket)
        for ticket, message in zip(tickets, messages, strict=True):
            self._waiting[ticket] = _Waiting(topic, message)
        return tickets

    def settle(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            if self._waiting.pop(ticket, None) is None and (place := self._places.pop(ticket, None)) is not None:
                self._leave(ticket, place)
                self._index.remove((ticket,))

    def retain(self, group_id: str, tickets: Iterable[int]) -> None:
        self._retained.setdefault(group_id, []).extend(tickets)

    def release(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            self.settle(self._retained.pop(group_id, ()))

    def retained(self) -> list[str]:
        """Groups of which something is retained."""
        return list(self._retained)

    def mark_taken(self, topic: str, ticket: int) -> None:
        if ticket > self._taken.get(topic, 0):
            self._taken[topic] = ticket
            self._index.mark_taken(topic, ticket)

    def write(self) -> None:
        if self._waiting:
            places = self.segments.append([waiting.message.payload for waiting in self._waiting.values()])
            entries = []
            for (ticket, (topic, message)), place in zip(_items(self._waiting), places, strict=True):
                self._stand(ticket, place)
                entries.append(JournalEntry(ticket, topic, message.message_id, message.group_id, place))
            self._index.add(entries)
            self._waiting.clear()
        if self._freed_bytes > self.segments.segment_bytes * (1 - SPARSE) / 2:
            self._clear_away()
        self.segments.sync()

    def written(self) -> None:
        if self._emptied:
            self.segments.drop(self._emptied)
            for segment in self._emptied:
                del self._tickets[segment], self._live_bytes[segment], self._total_bytes[segment]
            self._emptied.clear()

    def read(self, ticket: int) -> Payload:
        waiting = self._waiting.get(ticket)
        return waiting.message.payload if waiting is not None else self.segments.read(self._places[ticket])

    def close(self) -> None:
        """Let go of the files."""
        self.segments.close()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stand(self, ticket: int, place: Place) -> None:
        """This ticket's payload lies there."""
        self._places[ticket] = place
        size = HEADER_BYTES + place.size
        tickets = self._tickets.get(place.segment)
        if tickets is None:
            tickets = self._tickets[place.segment] = set()
            self._live_bytes[place.segment] = self._total_bytes[place.segment] = 0
        tickets.add(ticket)
        self._live_bytes[place.segment] += size
        self._total_bytes[place.segment] = max(self._total_bytes[place.segment], place.offset + size)

    def _leave(self, ticket: int, place: Place) -> None:
        tickets = self._tickets[place.segment]
        tickets.discard(ticket)
        self._live_bytes[place.segment] -= HEADER_BYTES + place.size
        self._freed_bytes += HEADER_BYTES + place.size
        if not tickets and place.segment != self.segments.active:
            self._emptied.add(place.segment)

    def _clear_away(self) -> None:
        """Full segments with nothing left in them go; of those with little, the emptiest is copied, and goes."""
        active = self.segments.active
        sparse = [
            segment
            for segment, live in self._live_bytes.items()
            if live < SPARSE * self._total_bytes[segment] and segment != active and segment not in self._wrong
        ]
        self._emptied.update(segment for segment in sparse if not self._tickets[segment])
        worth_copying = [segment for segment in sparse if self._tickets[segment]]
        if worth_copying:
            self._copy_out(min(worth_copying, key=self._live_bytes.__getitem__))
        if len(worth_copying) < 2:
            self._freed_bytes = 0

    def _copy_out(self, segment: int) -> None:
        """Write what is left in this segment once more, to the active one."""
        tickets = sorted(self._tickets[segment])
        try:
            payloads = [self.segments.read(self._places[ticket]) for ticket in tickets]
        except WrongRecord as error:
            log.error("the queue's journal cannot be compacted: %s", error)
            self._wrong.add(segment)
            return
        places = self.segments.append(payloads)
        for ticket, place in zip(tickets, places, strict=True):
            self._leave(ticket, self._places[ticket])
            self._stand(ticket, place)
        self._index.move(list(zip(tickets, places, strict=True)))


def _items(waiting: dict[int, _Waiting]) -> Iterable[tuple[int, tuple[str, Incoming]]]:
    return ((ticket, (each.topic, each.message)) for ticket, each in waiting.items())
