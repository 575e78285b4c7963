"""The ledger's file, ``ledger.sqlite``: what happened, appended in order by one writer, readable at any time.

No table has a unique constraint: the state machine keeps the order legal, and a reader can find what somebody broke. `tally`
holds, per table, the number of rows and the exclusive-or of each column, so that a row that is gone is known by name.

WAL and synchronous NORMAL: a transaction survives the death of the process; a power cut may take the last ones, whole, and
leaves a state that was. `LedgerWriter.append` only remembers; `flush` writes all that was remembered as one transaction.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.errors import IllegalTransition, LedgerCorrupt, LedgerError
from asyncrl.ledger.states import STATES, Attempts, Changes, FinishedStep, State, Transition
from asyncrl.messages import GroupId
from asyncrl.protocols.ledger import PromptCursor

FILE_NAME = "ledger.sqlite"
FORMAT_VERSION = 1
BUSY_SECONDS = 10.0
TALLIED = ("transitions", "reissues", "steps", "training_end")

_SCHEMA = f"""
CREATE TABLE transitions (seq INTEGER NOT NULL, epoch INTEGER NOT NULL, "row" INTEGER NOT NULL, attempt INTEGER NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL, step INTEGER, version INTEGER, wall_time REAL NOT NULL);
CREATE TABLE reissues (seq INTEGER NOT NULL, epoch INTEGER NOT NULL, "row" INTEGER NOT NULL, attempt INTEGER NOT NULL,
    wall_time REAL NOT NULL);
CREATE TABLE steps (step INTEGER NOT NULL, version INTEGER NOT NULL, taken INTEGER NOT NULL, wall_time REAL NOT NULL);
CREATE TABLE training_end (final_version INTEGER NOT NULL, wall_time REAL NOT NULL);
CREATE TABLE cursor (epoch INTEGER NOT NULL, position INTEGER NOT NULL, num_rows INTEGER, seed INTEGER NOT NULL,
    shuffle INTEGER NOT NULL);
CREATE TABLE tally (name TEXT NOT NULL, rows INTEGER NOT NULL, a INTEGER NOT NULL, b INTEGER NOT NULL, c INTEGER NOT NULL,
    d INTEGER NOT NULL);
PRAGMA user_version = {FORMAT_VERSION};
"""


class Tally(NamedTuple):
    """Number of rows of a table and the exclusive-or over them of up to four columns (`key_of`)."""

    rows: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0

    def add(self, key: tuple[int, int, int, int]) -> Tally:
        a, b, c, d = key
        return Tally(self.rows + 1, self.a ^ a, self.b ^ b, self.c ^ c, self.d ^ d)


class TransitionRow(NamedTuple):
    seq: int
    id: GroupId
    state: str
    reason: str
    step: int | None
    version: int | None
    wall_time: float

    @property
    def tally_key(self) -> tuple[int, int, int, int]:
        return (*self.id, STATES.index(self.state) if self.state in STATES else -1)


class ReissueRow(NamedTuple):
    """`id` is the attempt that was asked for, the ended one's + 1."""

    seq: int
    id: GroupId

    @property
    def tally_key(self) -> tuple[int, int, int, int]:
        return (*self.id, 0)


@dataclass(frozen=True)
class LedgerRecord:
    """Everything the file holds, in the order of its rows, unchecked."""

    transitions: Sequence[TransitionRow]
    reissues: Sequence[ReissueRow]
    steps: Sequence[FinishedStep]
    final_versions: Sequence[int]
    cursors: Sequence[PromptCursor]
    tallies: Sequence[tuple[str, Tally]]


class LedgerWriter:
    """The one writer of a ledger's file. Raises LedgerError when the disk refuses."""

    def __init__(self, path: Path, *, wall: Callable[[], float] = time.time):
        """Create the file, or go on where it stands (`attempts` then holds what it says)."""
        self.path = path
        self._wall = wall
        self._pending: list[tuple[float, Changes]] = []
        self._closed = False
        self.attempts = Attempts()
        self._tallies = {name: Tally() for name in TALLIED}
        with _naming(path):
            self._file = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = NORMAL")
            holds_tables = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
            if not holds_tables:
                self._create()
        if holds_tables:
            record = read_ledger(path)
            self.attempts = replay(record)
            self._tallies = {name: _tally(_keys(record, name)) for name in TALLIED}

    @property
    def dirty(self) -> bool:
        return bool(self._pending)

    def append(self, changes: Changes) -> None:
        """Remember changes, stamped with the time, for the next `flush`."""
        self._pending.append((self._wall(), changes))

    def flush(self) -> None:
        """Everything appended since the last flush, in one transaction."""
        if not self._pending:
            return
        with _naming(self.path):
            self._file.execute("BEGIN IMMEDIATE")
            try:
                self._write(self._pending)
                self._file.execute("COMMIT")
            except BaseException:
                self._file.execute("ROLLBACK")
                raise
        self._pending = []

    def close(self) -> None:
        """Flush, fold the write-ahead log into the file, let go: the file stands alone then, unless somebody reads it just now.
        Closing twice is harmless."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        with _naming(self.path):
            self._file.execute("PRAGMA busy_timeout = 0")
            with suppress(sqlite3.OperationalError):
                self._file.execute("PRAGMA journal_mode = DELETE")
            self._file.close()

    def _create(self) -> None:
        self._file.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            self._file.execute(statement)
        self._file.executemany("INSERT INTO tally VALUES (?, 0, 0, 0, 0, 0)", [(name,) for name in TALLIED])
        self._file.execute("COMMIT")

    def _write(self, pending: Sequence[tuple[float, Changes]]) -> None:
        tallies = dict(self._tallies)
        transitions: list[tuple[Any, ...]] = []
        reissues: list[tuple[Any, ...]] = []
        cursor = None
        for wall_time, changes in pending:
            for id, state, reason, step, version in changes.transitions:
                tallies["transitions"] = tallies["transitions"].add((*id, STATES.index(state)))
                transitions.append((tallies["transitions"].rows, *id, state, reason, step, version, wall_time))
            for id in changes.reissues:
                tallies["reissues"] = tallies["reissues"].add((*id, 0))
                reissues.append((tallies["reissues"].rows, *id, wall_time))
            if changes.step is not None:
                tallies["steps"] = tallies["steps"].add((*changes.step, 0))
                self._file.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (*changes.step, wall_time))
            if changes.final_version is not None:
                tallies["training_end"] = tallies["training_end"].add((changes.final_version, 0, 0, 0))
                self._file.execute("INSERT INTO training_end VALUES (?, ?)", (changes.final_version, wall_time))
            cursor = changes.cursor or cursor
        if transitions:
            self._file.executemany("INSERT INTO transitions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", transitions)
        if reissues:
            self._file.executemany("INSERT INTO reissues VALUES (?, ?, ?, ?, ?)", reissues)
        if cursor is not None:
            self._write_cursor(cursor)
        changed = [(*tally, name) for name, tally in tallies.items() if tally != self._tallies[name]]
        self._file.executemany("UPDATE tally SET rows = ?, a = ?, b = ?, c = ?, d = ? WHERE name = ?", changed)
        self._tallies = tallies

    def _write_cursor(self, cursor: PromptCursor) -> None:
        values = (cursor.epoch, cursor.position, cursor.num_rows, cursor.seed, cursor.shuffle)
        updated = self._file.execute("UPDATE cursor SET epoch = ?, position = ?, num_rows = ?, seed = ?, shuffle = ?", values)
        if updated.rowcount == 0:
            self._file.execute("INSERT INTO cursor VALUES (?, ?, ?, ?, ?)", values)


def read_ledger(path: Path) -> LedgerRecord:
    """The file's content at one instant, whoever is writing it. Raises LedgerError when there is none, LedgerCorrupt for
    something else than a ledger."""
    if not path.exists():
        raise LedgerError(f"there is no ledger at {path}: name the directory of a run that started")
    with _naming(path), closing(_open_to_read(path)) as file:
        file.execute("BEGIN")
        (version,) = file.execute("PRAGMA user_version").fetchone()
        if version != FORMAT_VERSION:
            raise LedgerCorrupt(f"{path} has format {version}, this asyncrl reads format {FORMAT_VERSION}")
        return LedgerRecord(
            transitions=[
                TransitionRow(seq, GroupId(epoch, row, attempt), *rest)
                for seq, epoch, row, attempt, *rest in file.execute("SELECT * FROM transitions ORDER BY rowid")
            ],
            reissues=[
                ReissueRow(seq, GroupId(epoch, row, attempt))
                for seq, epoch, row, attempt, _ in file.execute("SELECT * FROM reissues ORDER BY rowid")
            ],
            steps=[FinishedStep(*row) for row in file.execute("SELECT step, version, taken FROM steps ORDER BY rowid")],
            final_versions=[version for (version,) in file.execute("SELECT final_version FROM training_end ORDER BY rowid")],
            cursors=[
                PromptCursor(epoch, position, num_rows, seed, bool(shuffle))
                for epoch, position, num_rows, seed, shuffle in file.execute("SELECT * FROM cursor ORDER BY rowid")
            ],
            tallies=[(name, Tally(*rest)) for name, *rest in file.execute("SELECT * FROM tally ORDER BY rowid")],
        )


def replay(record: LedgerRecord) -> Attempts:
    """The states that the file's rows lead to. Raises LedgerCorrupt when they lead nowhere (`asyncrl audit` says more)."""
    if len(record.cursors) > 1 or len(record.final_versions) > 1 or len(record.tallies) != len(TALLIED):
        raise LedgerCorrupt("the ledger's single rows are not single: `asyncrl audit` names what is wrong")
    for name, tally in record.tallies:
        if tally != _tally(_keys(record, name)):
            raise LedgerCorrupt(f"the rows of the ledger's table {name} are not those written: `asyncrl audit` names them")
    attempts = Attempts()
    transitions = [Transition(row.id, _known(row.state), row.reason, row.step, row.version) for row in record.transitions]
    try:
        attempts.apply(Changes(transitions, [row.id for row in record.reissues], next(iter(record.cursors), None)))
        for step in record.steps:
            attempts.apply(Changes(step=step))
        for version in record.final_versions:
            attempts.apply(Changes(final_version=version))
    except IllegalTransition as error:
        raise LedgerCorrupt(f"the ledger holds what cannot have happened: {error}; `asyncrl audit` names it all") from error
    return attempts


def read_samples(run_dir: Path) -> dict[str, Any]:
    """The `samples` part of summary.json of a run whose ledger nobody serves any more."""
    return samples(replay(read_ledger(run_dir / FILE_NAME)))


def samples(attempts: Attempts) -> dict[str, Any]:
    """The terms of the law, and the ends that are not `trained` by reason."""
    return {**attempts.counts(), "reasons": dict(attempts.reasons)}


def tally_of(record: LedgerRecord, name: str) -> Tally:
    """What the tally of this table should be, from its rows."""
    return _tally(_keys(record, name))


def _keys(record: LedgerRecord, name: str) -> Iterator[tuple[int, int, int, int]]:
    match name:
        case "transitions":
            yield from (row.tally_key for row in record.transitions)
        case "reissues":
            yield from (row.tally_key for row in record.reissues)
        case "steps":
            yield from ((*step, 0) for step in record.steps)
        case "training_end":
            yield from ((version, 0, 0, 0) for version in record.final_versions)


def _tally(keys: Iterator[tuple[int, int, int, int]]) -> Tally:
    tally = Tally()
    for key in keys:
        tally = tally.add(key)
    return tally


def _known(state: str) -> State:
    if state not in STATES:
        raise LedgerCorrupt(f"the ledger names a state {state!r}, which is none of {', '.join(STATES)}")
    return state


def _open_to_read(path: Path) -> sqlite3.Connection:
    """Read-only. Where the directory cannot be written either, the file of a finished run is read as one that nobody changes."""
    file = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        file.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        file.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        file = sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True, isolation_level=None)
    return file


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        kind = LedgerError if isinstance(error, sqlite3.OperationalError) else LedgerCorrupt
        raise kind(f"the ledger {path} cannot be read or written: {error}") from error
