"""What services tell the ledger, and what they learn from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from asyncrl.messages import GroupId

EndState = Literal["trained", "filtered", "failed", "expired"]
LiveState = Literal["in_flight", "queued", "returned"]
"""returned: its data is lost and it waits to be generated again. In flight by the law, but not live for admission."""


@dataclass(frozen=True)
class PromptCursor:
    """Where the prompt source stands: `position` rows of `epoch` have been drawn; `num_rows` is None for an endless source.

    With (seed, shuffle, num_rows) it determines which (epoch, row) were dispatched, and in which order.
    """

    epoch: int
    position: int
    num_rows: int | None
    seed: int
    shuffle: bool


@dataclass(frozen=True)
class Dispatch:
    """A group that starts. `start_version`: the version that the servers had confirmed then."""

    id: GroupId
    start_version: int


@dataclass(frozen=True)
class End:
    """A group's end and its reason ("" for trained). `reissue`: its prompt starts again as attempt + 1."""

    id: GroupId
    state: EndState
    reason: str = ""
    reissue: bool = False


@dataclass(frozen=True)
class StepRecord:
    """A finished step: `step` counts from 1, `version` is the trainer's when it began, `ends` every group that it took.
    `staleness_bound`: what admission goes by from here on, where rollout.max_staleness is auto."""

    step: int
    version: int
    ends: tuple[End, ...]
    staleness_bound: int | None = None


@dataclass(frozen=True)
class LiveGroup:
    id: GroupId
    start_version: int
    state: LiveState


@dataclass(frozen=True)
class LedgerEvents:
    """What happened after `since`: ends in order, the steps finished so far, and whether training is over.

    `seq` is the next `since`. `training_done` carries the last policy version in `final_version`. `staleness_bound`: that of the
    last finished step.
    """

    seq: int
    ended: tuple[End, ...]
    finished_steps: int
    training_done: bool = False
    final_version: int | None = None
    staleness_bound: int | None = None


@dataclass(frozen=True)
class ReturnedGroup:
    """A live attempt whose data is lost, as a whole or in part: `missing` are the members that the queue does not hold."""

    id: GroupId
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Resumption:
    """Where a rollouter that has just started goes on. `seq`: the `since` of its first watch; `cursor`: None where nothing was
    drawn yet; `live`: in flight with every member in the queue's or the Reward front's hands, or queued; `returned`: to be
    generated again, first in line; `owed`: reissues asked for and not dispatched; `failures_by_row`: attempts that failed in a
    row; `staleness_bound`: that of the last finished step."""

    seq: int
    finished_steps: int
    final_version: int | None
    cursor: PromptCursor | None
    live: tuple[LiveGroup, ...] = ()
    returned: tuple[ReturnedGroup, ...] = ()
    owed: tuple[GroupId, ...] = ()
    failures_by_row: Mapping[int, int] = field(default_factory=dict)
    staleness_bound: int | None = None


class LedgerClient(Protocol):
    """One process writes the ledger; everybody else speaks to it through this.

    No call returns, and no watcher is told, before the change is in the file. A call may be made again, by a caller that got no
    answer: what already stands so is no error.
    """

    async def dispatch(self, groups: Sequence[Dispatch], cursor: PromptCursor) -> None:
        """Record the start of these groups and the cursor that stands behind them, in one transaction."""

    async def end(self, ends: Sequence[End]) -> None:
        """Groups that end outside a step: failed, expired at the pick, replaced under refill. They leave live at once."""

    async def finish_step(self, record: StepRecord) -> None:
        """A step is finished, and every group it took has ended, in one transaction."""

    async def finish_training(self, final_version: int) -> None:
        """No further step will be made."""

    async def watch(self, since: int, timeout: float) -> LedgerEvents:
        """Events after `since`; waits up to `timeout` seconds for the first."""

    async def live(self) -> list[LiveGroup]:
        """Every attempt without an end that is in flight or queued, oldest dispatch first; returned ones are not among them."""

    async def resume_rollouter(self) -> Resumption:
        """For a rollouter that has just started: returns the groups in flight of which the queue lacks a member, since nobody
        generates it, then says where everything stands."""

    async def restart(self, groups: Sequence[Dispatch]) -> None:
        """These returned groups passed admission again. Passed over: one that is queued or has ended by now."""

    async def sync(self) -> None:
        """What stands so far survives a power cut when this returns, whatever queue.durability is."""

    async def checkpointed(self, step: int) -> None:
        """A committed checkpoint holds the ends up to `step`: the queue need not keep those groups any longer."""
