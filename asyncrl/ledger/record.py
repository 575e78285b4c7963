"""What the ledger's file, ``ledger.sqlite``, holds: its tables, as rows; reading them; and the states that they lead to.

No table of history has a unique constraint: the state machine keeps the order legal, and a reader can find what somebody broke.
`tally` holds, per table, the number of rows and the exclusive-or of each column, so that a row that is gone is known by name.
Rows are numbered in the order they were written; only a start may take numbers out (`starts` says up to which), so from the last
start on there are no gaps. A row of `steps` says where the other tables stood: setting back to a step needs the step alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.errors import IllegalTransition, LedgerCorrupt, LedgerError
from asyncrl.ledger.states import STATES, Attempts, Changes, FinishedStep, State, Transition
from asyncrl.messages import GroupId
from asyncrl.protocols.journal import JournalEntry, Place
from asyncrl.protocols.ledger import PromptCursor

FILE_NAME = "ledger.sqlite"
FORMAT_VERSION = 3
BUSY_SECONDS = 10.0
TALLIED = ("transitions", "reissues", "steps", "training_end", "starts")

SCHEMA = f"""
CREATE TABLE transitions (seq INTEGER NOT NULL, epoch INTEGER NOT NULL, "row" INTEGER NOT NULL, attempt INTEGER NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL, step INTEGER, version INTEGER, wall_time REAL NOT NULL);
CREATE TABLE reissues (seq INTEGER NOT NULL, epoch INTEGER NOT NULL, "row" INTEGER NOT NULL, attempt INTEGER NOT NULL,
    wall_time REAL NOT NULL);
CREATE TABLE steps (step INTEGER NOT NULL, version INTEGER NOT NULL, taken INTEGER NOT NULL, seq INTEGER NOT NULL,
    reissue_seq INTEGER NOT NULL, epoch INTEGER, position INTEGER, staleness_bound INTEGER, wall_time REAL NOT NULL);
CREATE TABLE training_end (final_version INTEGER NOT NULL, seq INTEGER NOT NULL, wall_time REAL NOT NULL);
CREATE TABLE cursor (epoch INTEGER NOT NULL, position INTEGER NOT NULL, num_rows INTEGER, seed INTEGER NOT NULL,
    shuffle INTEGER NOT NULL);
CREATE TABLE starts (incarnation INTEGER NOT NULL, step INTEGER NOT NULL, mode TEXT NOT NULL, seq INTEGER NOT NULL,
    reissue_seq INTEGER NOT NULL, wall_time REAL NOT NULL);
CREATE TABLE tally (name TEXT NOT NULL, rows INTEGER NOT NULL, a INTEGER NOT NULL, b INTEGER NOT NULL, c INTEGER NOT NULL,
    d INTEGER NOT NULL);
CREATE TABLE queue (durability TEXT NOT NULL, retains INTEGER NOT NULL);
CREATE TABLE journal (ticket INTEGER PRIMARY KEY, topic TEXT NOT NULL, message_id TEXT NOT NULL, group_id TEXT NOT NULL,
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, size INTEGER NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE taken (topic TEXT PRIMARY KEY, ticket INTEGER NOT NULL);
CREATE TABLE closed (topic TEXT NOT NULL, producer TEXT NOT NULL);
PRAGMA user_version = {FORMAT_VERSION};
"""


class Tally(NamedTuple):
    """Number of rows of a table and the exclusive-or over them of up to four columns (`key_of`)."""

    rows: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0

    def add(self, *keys: tuple[int, int, int, int]) -> Tally:
        rows, a, b, c, d = self
        for key_a, key_b, key_c, key_d in keys:
            a, b, c, d = a ^ key_a, b ^ key_b, c ^ key_c, d ^ key_d
        return Tally(rows + len(keys), a, b, c, d)


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
    wall_time: float

    @property
    def tally_key(self) -> tuple[int, int, int, int]:
        return (*self.id, 0)


class StepRow(NamedTuple):
    """A finished step. seq, reissue_seq: the last rows of the other tables then; epoch, position: the cursor's, None before the
    first dispatch; staleness_bound: admission's from here on, None where it is fixed."""

    step: int
    version: int
    taken: int
    seq: int
    reissue_seq: int
    epoch: int | None
    position: int | None
    staleness_bound: int | None
    wall_time: float

    @property
    def tally_key(self) -> tuple[int, int, int, int]:
        return (self.step, self.version, self.taken, self.seq)


class TrainingEndRow(NamedTuple):
    final_version: int
    seq: int
    wall_time: float

    @property
    def tally_key(self) -> tuple[int, int, int, int]:
        return (self.final_version, self.seq, 0, 0)


class StartRow(NamedTuple):
    """A start of the trainer, from the checkpoint of `step`. `mode`: "fresh", "kept" or "dropped" (what the queue held).
    seq, reissue_seq: the largest numbers given out before it."""

    incarnation: int
    step: int
    mode: str
    seq: int
    reissue_seq: int
    wall_time: float

    @property
    def tally_key(self) -> tuple[int, int, int, int]:
        return (self.incarnation, self.step, self.seq, self.reissue_seq)


class QueueHead(NamedTuple):
    """How the queue was kept. `retains`: a scored group stays in the journal after its end, until a checkpoint holds it."""

    durability: str
    retains: bool


@dataclass(frozen=True)
class LedgerRecord:
    """Everything the file holds, in the order of its rows, unchecked."""

    transitions: Sequence[TransitionRow]
    reissues: Sequence[ReissueRow]
    steps: Sequence[StepRow]
    training_ends: Sequence[TrainingEndRow]
    cursors: Sequence[PromptCursor]
    starts: Sequence[StartRow]
    tallies: Sequence[tuple[str, Tally]]
    heads: Sequence[QueueHead]
    journal: Sequence[JournalEntry]

    @property
    def numbered_before(self) -> tuple[int, int]:
        """Up to which numbers rows of `transitions` and of `reissues` may be missing: those given out before the last start."""
        return (self.starts[-1].seq, self.starts[-1].reissue_seq) if self.starts else (0, 0)

    @property
    def journals(self) -> bool:
        """The queue kept a journal: what it does not hold is lost."""
        return bool(self.heads) and self.heads[-1].durability != "none"


def read_ledger(path: Path) -> LedgerRecord:
    """The file's content at one instant, whoever is writing it. Raises LedgerError when there is none, LedgerCorrupt for
    something else than a ledger."""
    if not path.exists():
        raise LedgerError(f"there is no ledger at {path}: name the directory of a run that started")
    with naming(path), closing(_open_to_read(path)) as file:
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
                ReissueRow(seq, GroupId(epoch, row, attempt), wall_time)
                for seq, epoch, row, attempt, wall_time in file.execute("SELECT * FROM reissues ORDER BY rowid")
            ],
            steps=[StepRow(*row) for row in file.execute("SELECT * FROM steps ORDER BY rowid")],
            training_ends=[TrainingEndRow(*row) for row in file.execute("SELECT * FROM training_end ORDER BY rowid")],
            cursors=[
                PromptCursor(epoch, position, num_rows, seed, bool(shuffle))
                for epoch, position, num_rows, seed, shuffle in file.execute("SELECT * FROM cursor ORDER BY rowid")
            ],
            starts=[StartRow(*row) for row in file.execute("SELECT * FROM starts ORDER BY rowid")],
            tallies=[(name, Tally(*rest)) for name, *rest in file.execute("SELECT * FROM tally ORDER BY rowid")],
            heads=[QueueHead(name, bool(retains)) for name, retains in file.execute("SELECT * FROM queue ORDER BY rowid")],
            journal=read_journal(file),
        )


def read_journal(file: sqlite3.Connection) -> list[JournalEntry]:
    """The journal's entries, in order of acceptance."""
    rows = file.execute("SELECT * FROM journal ORDER BY ticket")
    return [JournalEntry(ticket, topic, message, group, Place(*place)) for ticket, topic, message, group, *place in rows]


def replay(record: LedgerRecord) -> Attempts:
    """The states that the file's rows lead to, ends and steps in the order in which they happened, so that events keep their
    numbers. Raises LedgerCorrupt when they lead nowhere (`asyncrl audit` says more)."""
    if len(record.cursors) > 1 or len(record.training_ends) > 1 or len(record.tallies) != len(TALLIED):
        raise LedgerCorrupt("the ledger's single rows are not single: `asyncrl audit` names what is wrong")
    for name, tally in record.tallies:
        if tally != tally_of(record, name):
            raise LedgerCorrupt(f"the rows of the ledger's table {name} are not those written: `asyncrl audit` names them")
    attempts = Attempts()
    attempts.apply(Changes(reissues=[row.id for row in record.reissues], cursor=next(iter(record.cursors), None)))
    try:
        for changes in _in_order(record):
            attempts.apply(changes)
    except IllegalTransition as error:
        raise LedgerCorrupt(f"the ledger holds what cannot have happened: {error}; `asyncrl audit` names it all") from error
    return attempts


def _in_order(record: LedgerRecord) -> Iterator[Changes]:
    """Transitions up to each finished step, with that step, and so on to the end of training and what came after it."""
    ends: list[tuple[int, FinishedStep | None, int | None]] = [
        *((row.seq, FinishedStep(row.step, row.version, row.taken, row.staleness_bound), None) for row in record.steps),
        *((row.seq, None, row.final_version) for row in record.training_ends),
    ]
    rows = iter(record.transitions)
    row = next(rows, None)
    for seq, step, final_version in ends:
        transitions = []
        while row is not None and row.seq <= seq:
            transitions.append(_transition(row))
            row = next(rows, None)
        yield Changes(transitions, step=step, final_version=final_version)
    if row is not None:
        yield Changes([_transition(row), *map(_transition, rows)])


def _transition(row: TransitionRow) -> Transition:
    if row.state not in STATES:
        raise LedgerCorrupt(f"the ledger names a state {row.state!r}, which is none of {', '.join(STATES)}")
    state: State = row.state
    return Transition(row.id, state, row.reason, row.step, row.version)


def read_samples(run_dir: Path) -> dict[str, Any]:
    """The `samples` part of summary.json of a run whose ledger nobody serves any more."""
    return samples(replay(read_ledger(run_dir / FILE_NAME)))


def samples(attempts: Attempts) -> dict[str, Any]:
    """The terms of the law, and the ends that are not `trained` by reason."""
    return {**attempts.counts(), "reasons": dict(attempts.reasons)}


def tally_of(record: LedgerRecord, name: str) -> Tally:
    """What the tally of this table should be, from its rows."""
    rows: dict[str, Sequence[TransitionRow | ReissueRow | StepRow | TrainingEndRow | StartRow]] = {
        "transitions": record.transitions,
        "reissues": record.reissues,
        "steps": record.steps,
        "training_end": record.training_ends,
        "starts": record.starts,
    }
    tally = Tally()
    for row in rows.get(name, ()):
        tally = tally.add(row.tally_key)
    return tally


def _open_to_read(path: Path) -> sqlite3.Connection:
    """Read-only. Where the directory cannot be written either, the file of a finished run is read as one that nobody changes."""
    file = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        file.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        file.close()
        resolved = path.resolve()
        if resolved.with_name(resolved.name + "-wal").exists():
            raise
        file = sqlite3.connect(f"{resolved.as_uri()}?immutable=1", uri=True, isolation_level=None)
    return file


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """SQLite's errors, as the ledger's: with the file's name, and for a full disk with the fix."""
    try:
        yield
    except sqlite3.OperationalError as error:
        fix = ": free space there, or name another place in cluster.state_dir" if "full" in str(error) else ""
        raise LedgerError(f"the ledger {path} cannot be read or written: {error}{fix}") from error
    except sqlite3.DatabaseError as error:
        raise LedgerCorrupt(f"the ledger {path} cannot be read or written: {error}") from error
