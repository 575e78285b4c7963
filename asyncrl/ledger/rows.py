"""What can be wrong with the ledger's own rows, each named: gone, standing twice, out of order, or an impossible sequence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from asyncrl.ledger.record import TALLIED, LedgerRecord, Tally, tally_of
from asyncrl.ledger.states import END_STATES, STATES, SUCCESSORS, State
from asyncrl.messages import GroupId


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject` is the id, the step, or the row that is wrong; `problem` says how."""

    subject: str
    problem: str


def check_rows(record: LedgerRecord) -> list[Finding]:
    """Everything that the ledger's tables say wrong by themselves."""
    before, reissues_before = record.numbered_before
    transitions = [(row.seq, str(row.id)) for row in record.transitions]
    return [
        *_lost_rows(record),
        *_numbering("transition row", transitions, before),
        *_numbering("reissue row", [(row.seq, str(row.id)) for row in record.reissues], reissues_before),
        *_numbering("step", [(row.step, f"step {row.step}") for row in record.steps], 0),
        *_impossible_histories(record),
        *_impossible_reissues(record),
        *_steps_and_their_ends(record),
        *_single_rows(record),
    ]


def _lost_rows(record: LedgerRecord) -> Iterator[Finding]:
    """A row that is gone leaves its columns in the exclusive-or that the tally holds."""
    told = dict(record.tallies)
    for name, number in Counter(name for name, _ in record.tallies).items():
        if number > 1:
            yield Finding(f"tally of {name}", f"stands {number} times in the ledger")
    for name in TALLIED:
        if name not in told:
            yield Finding(f"tally of {name}", "is gone from the ledger")
            continue
        found = tally_of(record, name)
        if told[name].rows == found.rows + 1:
            yield _name_lost(name, told[name], found)
        elif told[name] != found:
            yield Finding(f"table {name}", f"has {found.rows} rows, {told[name].rows} were written, or rows were changed")


def _name_lost(name: str, told: Tally, found: Tally) -> Finding:
    a, b, c, d = (there ^ here for there, here in zip(told[1:], found[1:], strict=True))
    match name:
        case "transitions":
            state = STATES[d] if 0 <= d < len(STATES) else "?"
            return Finding(str(GroupId(a, b, c)), f"its transition to {state} is gone from the ledger")
        case "reissues":
            return Finding(str(GroupId(a, b, c)), "its reissue is gone from the ledger")
        case "steps":
            return Finding(f"step {a}", "is gone from the ledger")
        case "starts":
            return Finding(f"start {a}", "is gone from the ledger")
    return Finding("end of training", f"at version {a}, is gone from the ledger")


def _numbering(kind: str, rows: Sequence[tuple[int, str]], before: int) -> Iterator[Finding]:
    """Rows are numbered 1, 2, 3, … in the order they were written; up to number `before` a start may have taken some out."""
    counts = Counter(number for number, _ in rows)
    last = max(counts, default=0)
    for number, name in dict(rows).items():
        if counts[number] > 1:
            yield Finding(name, f"{kind} {number} stands {counts[number]} times in the ledger")
        if number < 1:
            yield Finding(name, f"{kind} {number}: numbers begin with 1")
    for number in range(before + 1, last + 1):
        if number not in counts:
            yield Finding(f"{kind} {number}", f"is gone from the ledger, which goes on to {last}")


def _impossible_histories(record: LedgerRecord) -> Iterator[Finding]:
    histories: dict[GroupId, list[str]] = defaultdict(list)
    for row in record.transitions:
        histories[row.id].append(row.state)
    for id, states in histories.items():
        present: State | None = None
        for state in states:
            if state not in SUCCESSORS[present]:
                yield Finding(str(id), f"the ledger has it {' → '.join(states)}: {state} cannot follow {present or 'nothing'}")
                break
            present = state


def _impossible_reissues(record: LedgerRecord) -> Iterator[Finding]:
    """A reissue belongs to a predecessor that ended otherwise than trained, and is asked for once."""
    ended = {row.id for row in record.transitions if row.state in END_STATES and row.state != "trained"}
    for id, number in Counter(row.id for row in record.reissues).items():
        if number > 1:
            yield Finding(str(id), f"was asked for {number} times as a reissue")
        if id.attempt < 1 or GroupId(id.epoch, id.row, id.attempt - 1) not in ended:
            yield Finding(str(id), "is a reissue, but the attempt before it has not ended")


def _steps_and_their_ends(record: LedgerRecord) -> Iterator[Finding]:
    ends = Counter(row.step for row in record.transitions if row.step is not None)
    steps = {row.step: row for row in record.steps}
    for step, finished in steps.items():
        if ends[step] != finished.taken:
            yield Finding(f"step {step}", f"took {finished.taken} groups, but {ends[step]} ended in it by the ledger")
    for row in record.transitions:
        if row.step is not None and row.step not in steps:
            yield Finding(str(row.id), f"ended in step {row.step}, which the ledger never finished")
        elif row.step is not None and row.version != steps[row.step].version:
            yield Finding(str(row.id), f"ended at version {row.version}, but step {row.step} began at {steps[row.step].version}")
        elif row.state == "trained" and row.step is None:
            yield Finding(str(row.id), "trained, but in no step")


def _single_rows(record: LedgerRecord) -> Iterator[Finding]:
    if len(record.cursors) > 1:
        yield Finding("prompt cursor", f"stands {len(record.cursors)} times in the ledger")
    if record.transitions and not record.cursors:
        yield Finding("prompt cursor", "is gone from the ledger")
    if len(record.training_ends) > 1:
        yield Finding("end of training", f"stands {len(record.training_ends)} times in the ledger")
    if record.starts and not record.heads:
        yield Finding("queue", "is gone from the ledger")
    if len(record.heads) > 1:
        yield Finding("queue", f"stands {len(record.heads)} times in the ledger")
    incarnations = [row.incarnation for row in record.starts]
    for earlier, later in pairwise(incarnations):
        if later <= earlier:
            problem = "stands twice in the ledger" if later == earlier else f"stands after start {earlier} in the ledger"
            yield Finding(f"start {later}", problem)
