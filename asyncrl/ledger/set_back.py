"""Going back to a checkpoint: which rows of the ledger go, which stay. Pure.

Checkpoint of step s, after which the trainer knows nothing. S is the last transition when s finished.

queue kept (process, power)     what ended in a step after s, or was filtered or expired after S, is queued again, unless its
                                prompt was asked for anew (then the successor carries the row); so is what ended because
                                training was over. Other rows stay: dispatches, reissues, the cursor, failures elsewhere.
queue dropped (none)            every row after S goes, reissues and the cursor with them.

Then what is live and has lost its data is returned: with the queue kept, the scored groups and members that the journal lacks;
else everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from asyncrl.errors import LedgerError
from asyncrl.ledger.record import TALLIED, LedgerRecord, TransitionRow, tally_of
from asyncrl.ledger.states import END_STATES, TRAINING_OVER, Attempts
from asyncrl.messages import GroupId
from asyncrl.protocols.ledger import PromptCursor

SET_BACK = "set back"


@dataclass(frozen=True)
class Held:
    """What the queue holds, unsettled: scored groups, and members of the others. A whole group has `members_per_group`
    members."""

    members_per_group: int
    scored: Collection[GroupId] = ()
    members: Mapping[GroupId, Collection[int]] = field(default_factory=dict)

    def missing(self, id: GroupId) -> tuple[int, ...]:
        """Members of this group, in flight or returned, that are nowhere in the queue."""
        return tuple(member for member in range(self.members_per_group) if member not in self.members.get(id, ()))


@dataclass(frozen=True)
class Remainder:
    """`record`: what stays, its tallies set anew. `gone`, `gone_reissues`: numbers of the rows that go; `outside`: of ends that
    stay although their step goes."""

    record: LedgerRecord
    gone: tuple[int, ...]
    gone_reissues: tuple[int, ...]
    outside: tuple[int, ...]


def set_back(record: LedgerRecord, step: int, *, keep: bool) -> Remainder:
    """What stays of the ledger when the trainer goes on from the checkpoint of `step`. Raises LedgerError for a step that the
    ledger never finished."""
    finished = {row.step: row for row in record.steps}
    if step and step not in finished:
        raise LedgerError(
            f"the ledger cannot be set back to step {step}, it finished {len(finished)}: resume from a checkpoint of this run"
        )
    last, last_reissue = (finished[step].seq, finished[step].reissue_seq) if step else (0, 0)
    if keep:
        asked = {row.id for row in record.reissues}
        stays = _stays_of_kept(last, asked)
        reissues, cursors = record.reissues, record.cursors
    else:
        stays = _up_to(last)
        reissues = [row for row in record.reissues if row.seq <= last_reissue]
        cursors = [_cursor_at(cursor, record, step) for cursor in record.cursors]
    outside = [row for row in record.transitions if stays(row) and row.step is not None and row.step > step]
    moved = {row.seq for row in outside}
    transitions = [row._replace(step=None, version=None) if row.seq in moved else row for row in record.transitions if stays(row)]
    kept = replace(
        record,
        transitions=transitions,
        reissues=reissues,
        steps=[row for row in record.steps if row.step <= step],
        training_ends=[],
        cursors=cursors,
    )
    return Remainder(
        record=replace(kept, tallies=[(name, tally_of(kept, name)) for name in TALLIED]),
        gone=tuple(row.seq for row in record.transitions if not stays(row)),
        gone_reissues=tuple(row.seq for row in record.reissues if not keep and row.seq > last_reissue),
        outside=tuple(sorted(moved)),
    )


def lost(attempts: Attempts, held: Held | None) -> list[GroupId]:
    """Live attempts whose data nobody has: those that the queue lacks, or, where it held nothing (None), all."""
    if held is None:
        return [group.id for group in attempts.live()]
    return [
        group.id
        for group in attempts.live()
        if (group.id not in held.scored if group.state == "queued" else held.missing(group.id))
    ]


def _up_to(last: int) -> Callable[[TransitionRow], bool]:
    return lambda row: row.seq <= last


def _stays_of_kept(last: int, asked: Collection[GroupId]) -> Callable[[TransitionRow], bool]:
    def stays(row: TransitionRow) -> bool:
        if row.seq <= last or row.state not in END_STATES:
            return True
        if GroupId(row.id.epoch, row.id.row, row.id.attempt + 1) in asked:
            return True
        in_step = row.step is not None
        return row.state == "failed" and not in_step and row.reason != TRAINING_OVER

    return stays


def _cursor_at(cursor: PromptCursor, record: LedgerRecord, step: int) -> PromptCursor:
    """Where the prompt source stood when `step` finished."""
    row = next((row for row in record.steps if row.step == step), None)
    epoch, position = (row.epoch or 0, row.position or 0) if row is not None else (0, 0)
    return replace(cursor, epoch=epoch, position=position)
