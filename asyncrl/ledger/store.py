"""Writing the ledger's file: one writer, which goes on where the file stands.

WAL. With synchronous NORMAL a transaction survives the death of the process; a power cut may take the last ones, whole, and
leaves a state that was. With FULL (`power`) it survives that too. `append` only remembers; `flush` writes all that was
remembered, and what the queue's journal has for the file, as one transaction.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.ledger.journal_rows import JournalRows
from asyncrl.ledger.record import (
    BUSY_SECONDS,
    FILE_NAME,
    SCHEMA,
    TALLIED,
    LedgerRecord,
    QueueHead,
    StartRow,
    StepRow,
    Tally,
    TrainingEndRow,
    naming,
    read_ledger,
    read_samples,
    replay,
    samples,
)
from asyncrl.ledger.set_back import SET_BACK, Held, Remainder, lost, set_back
from asyncrl.ledger.states import STATES, Attempts, Changes
from asyncrl.protocols.ledger import PromptCursor

__all__ = ["FILE_NAME", "LedgerWriter", "read_ledger", "read_samples", "replay", "samples"]

_ROWS_A_PASS = 500
_STATE_NUMBER = {state: number for number, state in enumerate(STATES)}


class LedgerWriter:
    """The one writer of a ledger's file. Raises LedgerError when the disk refuses."""

    def __init__(self, path: Path, *, wall: Callable[[], float] = time.time, power: bool = False):
        """Create the file, or go on where it stands (`attempts` then holds what it says). `power`: survive a power cut."""
        self.path = path
        self._wall = wall
        self._pending: list[tuple[float, Changes]] = []
        self._closed = False
        self._closed_streams: dict[str, frozenset[str]] = {}
        self._seq = self._reissue_seq = 0
        self._cursor: PromptCursor | None = None
        self._last_start: StartRow | None = None
        self._tallies: dict[str, Tally] = {}
        with naming(path):
            self._file = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute(f"PRAGMA synchronous = {'FULL' if power else 'NORMAL'}")
            if self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                self._create()
        self.journal = JournalRows(self._file)
        self._stand_at(read_ledger(path))

    @property
    def dirty(self) -> bool:
        """Something waits that has to be in the file before anybody is told."""
        return bool(self._pending or self._closed_streams) or self.journal.dirty

    @property
    def has_started(self) -> bool:
        """The file has a word of a run already."""
        return self._last_start is not None or self._seq > 0

    @property
    def last_start(self) -> StartRow | None:
        """The newest start that the file knows."""
        return self._last_start

    def append(self, changes: Changes) -> None:
        """Remember changes, stamped with the time, for the next `flush`."""
        self._pending.append((self._wall(), changes))

    def close_streams(self, topic: str, producers: frozenset[str]) -> None:
        """Remember, for the next `flush`, which producers of this topic have ended their stream."""
        self._closed_streams[topic] = producers

    def closed_streams(self) -> dict[str, set[str]]:
        """What the file says: producers that have ended their stream, by topic. A start forgets them."""
        found: dict[str, set[str]] = {}
        for topic, producer in self._file.execute("SELECT topic, producer FROM closed"):
            found.setdefault(topic, set()).add(producer)
        return found

    def flush(self) -> None:
        """Everything appended since the last flush, in one transaction."""
        if self.dirty:
            self._transact(lambda: self._write(self._pending))
            self._pending = []
            self._closed_streams.clear()

    def sync(self) -> None:
        """What was flushed survives a power cut when this returns. Folding the log into the file syncs both."""
        with naming(self.path):
            self._file.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def start(self, incarnation: int, head: QueueHead, *, mode: str = "fresh", step: int = 0) -> None:
        """Record a start of the trainer, and how the queue is kept."""
        row = StartRow(incarnation, step, mode, self._seq, self._reissue_seq, self._wall())
        self._transact(lambda: self._write_start(row, head))
        self._last_start = row

    def keep_queue(self, head: QueueHead) -> None:
        """Record how the queue is kept; where it keeps nothing, streams begin anew."""
        self._transact(lambda: self._write_head(head))

    def set_back(self, step: int, incarnation: int, head: QueueHead, held: Held | None) -> Attempts:
        """The trainer goes on from the checkpoint of `step`, as start number `incarnation`; see `ledger.set_back`. `held`: what
        the queue kept, None where it kept nothing. One transaction; `attempts` is made anew. Raises LedgerError for a step that
        was never finished."""
        self.flush()
        record = read_ledger(self.path)
        seq, reissue_seq = self._seq, self._reissue_seq
        remainder = set_back(record, step, keep=held is not None)
        self._stand_at(remainder.record)
        self._seq, self._reissue_seq = seq, reissue_seq
        returned = self.attempts.take_back(lost(self.attempts, held), f"{SET_BACK} to step {step}")
        mode = "dropped" if held is None else "kept"
        row = StartRow(incarnation, step, mode, seq, reissue_seq, self._wall())

        def write() -> None:
            self._write_remainder(remainder, step)
            self._write([(row.wall_time, returned)])
            self._write_start(row, head)

        self._transact(write)
        self._last_start = row
        return self.attempts

    def close(self) -> None:
        """Flush, fold the write-ahead log into the file, let go: the file stands alone then, unless somebody reads it just now.
        Closing twice is harmless."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        with naming(self.path):
            self._file.execute("PRAGMA busy_timeout = 0")
            with suppress(sqlite3.OperationalError):
                self._file.execute("PRAGMA journal_mode = DELETE")
            self._file.close()

    def abandon(self) -> None:
        """Let go without writing what waits: after a disk refused."""
        self._closed = True
        with suppress(sqlite3.Error):
            self._file.close()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stand_at(self, record: LedgerRecord) -> None:
        self.attempts = replay(record)
        self._tallies = dict(record.tallies)
        seq, reissue_seq = record.numbered_before
        self._seq = max([seq, *(row.seq for row in record.transitions[-1:])])
        self._reissue_seq = max([reissue_seq, *(row.seq for row in record.reissues[-1:])])
        self._cursor = record.cursors[0] if record.cursors else None
        self._last_start = record.starts[-1] if record.starts else None

    def _create(self) -> None:
        self._file.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";"):
            self._file.execute(statement)
        self._file.executemany("INSERT INTO tally VALUES (?, 0, 0, 0, 0, 0)", [(name,) for name in TALLIED])
        self._file.execute("COMMIT")

    def _transact(self, write: Callable[[], None]) -> None:
        """One transaction: this, and what the journal has for the file."""
        with naming(self.path):
            self._file.execute("BEGIN IMMEDIATE")
            try:
                write()
                self.journal.write()
                self._file.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.OperationalError):  # a full disk may have rolled it back by itself
                    self._file.execute("ROLLBACK")
                raise
        self.journal.written()

    def _write(self, pending: Sequence[tuple[float, Changes]]) -> None:
        tallies = dict(self._tallies)
        transitions: list[tuple[Any, ...]] = []
        keys: list[tuple[int, int, int, int]] = []  # of the transitions
        reissues: list[tuple[Any, ...]] = []
        moved = None
        for wall_time, changes in pending:
            for id, state, reason, in_step, at_version in changes.transitions:
                self._seq += 1
                keys.append((*id, _STATE_NUMBER[state]))
                transitions.append((self._seq, *id, state, reason, in_step, at_version, wall_time))
            for id in changes.reissues:
                self._reissue_seq += 1
                tallies["reissues"] = tallies["reissues"].add((*id, 0))
                reissues.append((self._reissue_seq, *id, wall_time))
            if changes.cursor is not None:
                self._cursor = moved = changes.cursor
            if changes.step is not None:
                step, version, taken, bound = changes.step
                epoch, position = (self._cursor.epoch, self._cursor.position) if self._cursor else (None, None)
                step_row = StepRow(step, version, taken, self._seq, self._reissue_seq, epoch, position, bound, wall_time)
                tallies["steps"] = tallies["steps"].add(step_row.tally_key)
                self._file.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", step_row)
            if changes.final_version is not None:
                end_row = TrainingEndRow(changes.final_version, self._seq, wall_time)
                tallies["training_end"] = tallies["training_end"].add(end_row.tally_key)
                self._file.execute("INSERT INTO training_end VALUES (?, ?, ?)", end_row)
        if transitions:
            tallies["transitions"] = tallies["transitions"].add(*keys)
            self._file.executemany("INSERT INTO transitions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", transitions)
        if reissues:
            self._file.executemany("INSERT INTO reissues VALUES (?, ?, ?, ?, ?)", reissues)
        if moved is not None:
            self._write_cursor(moved)
        for topic, producers in self._closed_streams.items():
            self._file.execute("DELETE FROM closed WHERE topic = ?", (topic,))
            self._file.executemany("INSERT INTO closed VALUES (?, ?)", [(topic, producer) for producer in producers])
        changed = [(*tally, name) for name, tally in tallies.items() if tally != self._tallies[name]]
        if changed:
            self._file.executemany("UPDATE tally SET rows = ?, a = ?, b = ?, c = ?, d = ? WHERE name = ?", changed)
        self._tallies = tallies

    def _write_cursor(self, cursor: PromptCursor) -> None:
        values = (cursor.epoch, cursor.position, cursor.num_rows, cursor.seed, cursor.shuffle)
        updated = self._file.execute("UPDATE cursor SET epoch = ?, position = ?, num_rows = ?, seed = ?, shuffle = ?", values)
        if updated.rowcount == 0:
            self._file.execute("INSERT INTO cursor VALUES (?, ?, ?, ?, ?)", values)

    def _write_start(self, row: StartRow, head: QueueHead) -> None:
        self._file.execute("INSERT INTO starts VALUES (?, ?, ?, ?, ?, ?)", row)
        self._file.execute("DELETE FROM closed")
        tally = self._tallies["starts"] = self._tallies["starts"].add(row.tally_key)
        self._file.execute("UPDATE tally SET rows = ?, a = ?, b = ?, c = ?, d = ? WHERE name = 'starts'", tally)
        self._write_head(head)

    def _write_head(self, head: QueueHead) -> None:
        if head.durability == "none":
            self._file.execute("DELETE FROM closed")
        self._file.execute("DELETE FROM queue")
        self._file.execute("INSERT INTO queue VALUES (?, ?)", head)

    def _write_remainder(self, remainder: Remainder, step: int) -> None:
        """Take out the rows that go, and set cursor and tallies to what stays."""
        self._for_rows("DELETE FROM transitions", remainder.gone)
        self._for_rows("UPDATE transitions SET step = NULL, version = NULL", remainder.outside)
        self._for_rows("DELETE FROM reissues", remainder.gone_reissues)
        self._file.execute("DELETE FROM steps WHERE step > ?", (step,))
        self._file.execute("DELETE FROM training_end")
        for cursor in remainder.record.cursors:
            self._write_cursor(cursor)
        changed = [(*tally, name) for name, tally in remainder.record.tallies]
        self._file.executemany("UPDATE tally SET rows = ?, a = ?, b = ?, c = ?, d = ? WHERE name = ?", changed)

    def _for_rows(self, statement: str, numbers: Sequence[int]) -> None:
        """Many rows to a pass: their tables have no index, which would cost more on every append."""
        for start in range(0, len(numbers), _ROWS_A_PASS):
            some = numbers[start : start + _ROWS_A_PASS]
            self._file.execute(f"{statement} WHERE seq IN ({', '.join('?' * len(some))})", some)
