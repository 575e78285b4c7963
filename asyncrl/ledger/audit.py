"""The audit: dispatched = trained + filtered + failed + expired + in flight + queued, each term from a witness of its own.

    dispatched                  the prompt cursor's order, and the list of reissues
    trained                     batches.jsonl, up to the last step that the ledger calls finished
    filtered, failed, expired   the ledger's ends
    queued                      the queue              } a live run's own word; of a dead run the journal stands for the queue,
    in flight                   rollouter and Reward   } and what else has no end is in flight, to be generated again
    returned                    nobody                 } they count as in flight

A dead run without a journal (queue.durability none) has lost what was not ended: all of that is in flight.

An id must be in exactly one place; one found in none or in two is named, and so is a row of the ledger that is gone, stands
twice, or says what cannot have happened. The parts of a live run are asked one after the other while groups move on, so
there a difference is real only if it is found again for up to `patience` seconds.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import TransportError
from asyncrl.ledger.batches import BatchLine, read_batches
from asyncrl.ledger.record import FILE_NAME, LedgerRecord, read_ledger
from asyncrl.ledger.rows import Finding, check_rows
from asyncrl.ledger.states import END_STATES, reason_key
from asyncrl.messages import GroupId
from asyncrl.messages.order import prompt_order
from asyncrl.protocols.ledger import PromptCursor

TERMS = (*END_STATES, "in_flight", "queued")
PATIENCE_SECONDS = 5.0
PAUSE_SECONDS = 0.2
SHOWN = 20


class LiveWitness(Protocol):
    """The parts of a live run. Raises TransportError when one of them does not answer."""

    def in_flight(self) -> Collection[GroupId]:
        """Groups that the rollouter generates, that wait unscored in the queue, or that the Reward front holds."""

    def queued(self) -> Collection[GroupId]:
        """Groups whose scored group the queue holds or has lent to the trainer."""


@dataclass(frozen=True)
class AuditReport:
    """`counts` are the terms of the law; `findings` is empty for a healthy run; `notes` say what was left out and why."""

    run_dir: str
    live: bool
    finished_steps: int
    counts: dict[str, int]
    reasons: dict[str, int]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def balanced(self) -> bool:
        return self.counts["dispatched"] == sum(self.counts[term] for term in TERMS)

    def to_json(self) -> dict[str, Any]:
        """Plain values: every field, `ok` and `balanced`."""
        return {**asdict(self), "ok": self.ok, "balanced": self.balanced}

    def to_text(self) -> str:
        """For a person: the law with its numbers, then every finding, the first ones in full."""
        terms = " + ".join(f"{self.counts[term]} {term.replace('_', ' ')}" for term in TERMS)
        sign = "=" if self.balanced else "≠"
        lines = [f"{self.counts['dispatched']} dispatched {sign} {terms}, after {self.finished_steps} steps"]
        lines += [f"  {number} × {reason}" for reason, number in sorted(self.reasons.items())]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"{finding.subject}: {finding.problem}" for finding in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            lines.append(f"… and {len(self.findings) - SHOWN} more (--json lists them all)")
        lines.append("clean" if self.ok else f"{len(self.findings)} findings: the ledger of {self.run_dir} does not balance")
        return "\n".join(lines)


def audit(
    run_dir: Path,
    ask: LiveWitness | None = None,
    *,
    patience: float = PATIENCE_SECONDS,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> AuditReport:
    """Hold the ledger of a run against its witnesses; `ask` speaks for a live run. Blocks for up to `patience` seconds and the
    time of two looks. Raises LedgerError where there is no ledger, LedgerCorrupt where the file is none."""
    report = _look(run_dir, ask)
    troubled = {finding.subject for finding in report.findings}
    deadline = now() + patience
    while report.live and troubled and now() < deadline:
        sleep(PAUSE_SECONDS)
        report = _look(run_dir, ask, passing=troubled)
        troubled &= {finding.subject for finding in report.findings}
    return replace(report, findings=tuple(finding for finding in report.findings if finding.subject in troubled))


def _look(run_dir: Path, ask: LiveWitness | None, *, passing: Collection[str] | None = None) -> AuditReport:
    """One look. An id that is in none or in two for the first time (not in `passing`) is counted where the ledger has it."""
    told, notes = _ask(ask)
    lines, batch_findings, batch_notes = read_batches(run_dir)
    record = read_ledger(run_dir / FILE_NAME)
    history = _history(record)
    findings = [*check_rows(record), *batch_findings]
    notes += batch_notes
    finished_steps = max((row.step for row in record.steps), default=0)
    trained = _trained(lines, finished_steps, record, findings, notes)
    flying, waiting = told if told is not None else _left_by_the_dead(record, history, findings, notes)
    flying = {*flying, *(id for id, states in history.items() if states[-1] == "returned")}
    if record.training_ends:
        findings += [Finding(str(id), "training is over, yet it has no end") for id in (*flying, *waiting)]
    expected = _dispatched(record, history, findings)
    counts = _count(expected, _places(history, trained, flying, waiting), history, findings, passing)
    return AuditReport(
        run_dir=str(run_dir),
        live=told is not None,
        finished_steps=finished_steps,
        counts=counts,
        reasons=_reasons(record),
        findings=tuple(findings),
        notes=tuple(notes),
    )


def _ask(ask: LiveWitness | None) -> tuple[tuple[Collection[GroupId], Collection[GroupId]] | None, list[str]]:
    """In flight and queued, by the parts themselves; None for a run that is dead, or that turns out to be."""
    if ask is None:
        return None, []
    try:
        return (ask.in_flight(), ask.queued()), []
    except TransportError as error:
        return None, [f"the run does not answer ({error}): audited as a dead one"]


def _left_by_the_dead(
    record: LedgerRecord, history: dict[GroupId, list[str]], findings: list[Finding], notes: list[str]
) -> tuple[Collection[GroupId], Collection[GroupId]]:
    """In flight and queued of a run that nobody speaks for: by its journal, where it kept one."""
    unended = {id for id, states in history.items() if states[-1] not in END_STATES}
    waiting = unended & _journalled(record, history, findings) if record.journals else set()
    queued = {id for id in unended if history[id][-1] == "queued"} if record.journals else set()
    findings += [Finding(str(id), "queued by the ledger, but its scored group is not in the journal") for id in queued - waiting]
    findings += [Finding(str(id), "its scored group is in the journal, but not queued by the ledger") for id in waiting - queued]
    flying = unended - waiting
    if flying:
        notes.append(f"{len(flying)} groups were not scored when the run stopped: in flight, to be generated again")
    if waiting:
        notes.append(f"{len(waiting)} scored groups wait in the journal")
    return flying, waiting


def _journalled(record: LedgerRecord, history: dict[GroupId, list[str]], findings: list[Finding]) -> set[GroupId]:
    """Groups whose scored group is in the journal. Names entries that belong to nothing, or to what has no need of them."""
    scored: set[GroupId] = set()
    for entry in record.journal:
        try:
            id = GroupId.parse(entry.group_id)
        except ValueError:
            findings.append(Finding(entry.message_id, f"is in the journal, but its group {entry.group_id!r:.40} is no id"))
            continue
        states = history.get(id)
        is_scored = entry.message_id == entry.group_id
        if states is None:
            findings.append(Finding(str(id), f"{entry.message_id} is in the journal, but the group was never dispatched"))
        elif states[-1] in END_STATES and not (is_scored and record.heads[-1].retains):
            findings.append(Finding(str(id), f"{entry.message_id} is in the journal still, but the group is {states[-1]}"))
        elif states[-1] == "queued" and not is_scored:
            findings.append(Finding(str(id), f"{entry.message_id} is in the journal still, but the group is queued"))
        if is_scored:
            scored.add(id)
    return scored


def _reasons(record: LedgerRecord) -> dict[str, int]:
    ends = (row for row in record.transitions if row.state in END_STATES and row.state != "trained")
    return dict(Counter(reason_key(row.state, row.reason) for row in ends))


def _history(record: LedgerRecord) -> dict[GroupId, list[str]]:
    history: dict[GroupId, list[str]] = defaultdict(list)
    for row in record.transitions:
        history[row.id].append(row.state)
    return dict(history)


def _trained(
    lines: Sequence[BatchLine], finished_steps: int, record: LedgerRecord, findings: list[Finding], notes: list[str]
) -> list[GroupId]:
    """The ids that batches.jsonl says trained in finished steps. Compares its lines with the ledger's steps on the way."""
    ahead = [line.step for line in lines if line.step > finished_steps]
    if ahead:
        steps = ", ".join(map(str, ahead))
        notes.append(f"batches.jsonl names step {steps}, past the ledger's last step {finished_steps}: not finished, left out")
    if len(ahead) > 1:
        findings += [Finding(f"step {step}", "stands in batches.jsonl, but the ledger never finished it") for step in ahead]
    by_step: dict[int, list[BatchLine]] = defaultdict(list)
    for line in lines:
        by_step[line.step].append(line)
    versions = {row.step: row.version for row in record.steps}
    for step in range(1, finished_steps + 1):
        found = by_step.get(step, [])
        if len(found) != 1:
            number = "has no line" if not found else f"has {len(found)} lines"
            findings.append(Finding(f"step {step}", f"{number} in batches.jsonl, but one is due for every finished step"))
        elif step in versions and found[0].version != versions[step]:
            problem = f"began at version {found[0].version} by batches.jsonl, at {versions[step]} by the ledger"
            findings.append(Finding(f"step {step}", problem))
    in_ledger = {(row.id, row.step) for row in record.transitions if row.state == "trained"}
    trained = [(id, line.step) for line in lines if line.step <= finished_steps for id in line.groups]
    findings += [
        Finding(str(id), f"trained at step {step} by batches.jsonl, not by the ledger")
        for id, step in trained
        if (id, step) not in in_ledger
    ]
    return [id for id, _ in trained]


def _places(
    history: dict[GroupId, list[str]], trained: Collection[GroupId], flying: Collection[GroupId], waiting: Collection[GroupId]
) -> dict[GroupId, list[str]]:
    """Every place where an id was found, `trained` once per line that names it."""
    places: dict[GroupId, list[str]] = defaultdict(list)
    for id in trained:
        places[id].append("trained")
    for id, states in history.items():
        places[id] += [state for state in states if state in END_STATES and state != "trained"]
    for id in set(flying):
        places[id].append("in_flight")
    for id in set(waiting):
        places[id].append("queued")
    return places


def _dispatched(record: LedgerRecord, history: dict[GroupId, list[str]], findings: list[Finding]) -> set[GroupId]:
    """What was dispatched by the cursor's order and the reissues (those that are owed still are not dispatched yet). Compares it
    with what the ledger says was."""
    if not record.cursors:
        return set(history)  # the missing cursor is a finding of its own
    expected = _drawn(record.cursors[0])
    expected |= {row.id for row in record.reissues if row.id in history}
    for id, states in history.items():
        if "dispatched" not in states:
            findings.append(Finding(str(id), f"the ledger has it {', '.join(states)}, but never dispatched"))
        if id not in expected:
            source = "the list of reissues" if id.attempt else "the prompt order up to the cursor"
            findings.append(Finding(str(id), f"dispatched by the ledger, but not in {source}"))
    findings += [
        Finding(str(id), "drawn by the prompt cursor, but the ledger has no word of it") for id in expected - history.keys()
    ]
    return expected


def _drawn(cursor: PromptCursor) -> set[GroupId]:
    """First attempts up to the cursor: every row of the epochs before, and the rows of its own in their order."""
    drawn: set[GroupId] = set()
    for epoch in range(cursor.epoch + 1):
        whole = epoch < cursor.epoch or cursor.position == cursor.num_rows
        if whole and cursor.num_rows is not None:
            rows: Iterable[int] = range(cursor.num_rows)
        else:
            rows = islice(prompt_order(cursor.seed, epoch, cursor.num_rows, cursor.shuffle), cursor.position)
        drawn.update(GroupId(epoch, row, 0) for row in rows)
    return drawn


def _count(
    expected: set[GroupId],
    places: dict[GroupId, list[str]],
    history: dict[GroupId, list[str]],
    findings: list[Finding],
    passing: Collection[str] | None,
) -> dict[str, int]:
    """The terms of the law over the dispatched ids; names each id that is in none, in two, or was never dispatched."""
    counts = {"dispatched": len(expected), **dict.fromkeys(TERMS, 0)}
    for id in expected:
        found = places.get(id, [])
        if len(found) == 1:
            counts[found[0]] += 1
            continue
        findings.append(Finding(str(id), _misplaced(found, history.get(id, []))))
        if passing is not None and str(id) not in passing and id in history:
            last = history[id][-1]
            counts[last if last in TERMS else "in_flight"] += 1
    for id, found in places.items():
        if id not in expected:
            findings.append(Finding(str(id), f"{' and '.join(found)}, but never dispatched"))
    return counts


def _misplaced(found: Sequence[str], states: Sequence[str]) -> str:
    if found:
        return f"in {len(found)} places: {' and '.join(place.replace('_', ' ') for place in found)}"
    ledger = f" (the ledger has it {', '.join(states)})" if states else ""
    return f"dispatched, but in no place: not trained in batches.jsonl, without another end, not in flight, not queued{ledger}"
