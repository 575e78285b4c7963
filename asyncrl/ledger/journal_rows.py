"""The journal's ids and places in the ledger's file: `protocols.journal.JournalIndex`, written with the ledger's own changes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence

from asyncrl.ledger.record import read_journal
from asyncrl.protocols.journal import JournalEntry, Place


class JournalRows:
    """Changes that wait for the next transaction, and the tables that they go to."""

    def __init__(self, file: sqlite3.Connection):
        self._file = file
        self._added: dict[int, JournalEntry] = {}
        self._removed: list[tuple[int]] = []
        self._moved: dict[int, Place] = {}
        self._taken: dict[str, int] = {}

    @property
    def dirty(self) -> bool:
        """Something waits that has to be in the file before anybody is told."""
        return bool(self._added or self._removed or self._moved)

    def add(self, entries: Sequence[JournalEntry]) -> None:
        for entry in entries:
            self._added[entry.ticket] = entry

    def remove(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            if self._added.pop(ticket, None) is None:
                self._moved.pop(ticket, None)
                self._removed.append((ticket,))

    def move(self, places: Sequence[tuple[int, Place]]) -> None:
        for ticket, place in places:
            if ticket in self._added:
                self._added[ticket] = self._added[ticket]._replace(place=place)
            else:
                self._moved[ticket] = place

    def mark_taken(self, topic: str, ticket: int) -> None:
        self._taken[topic] = ticket

    def entries(self) -> list[JournalEntry]:
        return read_journal(self._file)

    def taken(self) -> Mapping[str, int]:
        return dict(self._file.execute("SELECT topic, ticket FROM taken").fetchall())

    def write(self) -> None:
        """Everything that waits, inside the transaction that the caller opened. `written` must follow its commit."""
        execute = self._file.executemany
        if self._added:
            rows = [(ticket, topic, message, group, *place) for ticket, topic, message, group, place in self._added.values()]
            execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        if self._removed:
            execute("DELETE FROM journal WHERE ticket = ?", self._removed)
        if self._moved:
            moved = [(*place, ticket) for ticket, place in self._moved.items()]
            execute("UPDATE journal SET segment = ?, offset = ?, size = ?, checksum = ? WHERE ticket = ?", moved)
        if self._taken:
            execute("INSERT OR REPLACE INTO taken VALUES (?, ?)", self._taken.items())

    def written(self) -> None:
        """What waited is in the file."""
        self._added.clear()
        self._removed.clear()
        self._moved.clear()
        self._taken.clear()
