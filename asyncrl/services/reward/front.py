"""The Reward front: trajectories in, scored groups out. The picture is in the package's docstring.

loop        consumes                waits for                      is unblocked by
_receive    rollouts                a trajectory                   the queue; end of stream ends the loop
_send       scored groups           a scored group, then room      the last member's score; the `scored` topic
_give_up    failed groups           a failed group, then the RPC   the last member's score; the ledger
_watch      workers' registrations  a second to pass               the clock
(a task)    one batch               a worker's answer              the worker, or its loss
(a task)    responses               the teacher, if there is one   its answer, algorithm.teacher.timeout_seconds

`_receive` never waits for workers or for the `scored` topic: what is here is bounded by the admitted groups, by no buffer's size.
A trajectory is here until its group's end is accepted by the queue or by the ledger; `in_flight` names those groups. A front that
takes a lost one's place gets them again from the queue; what had an end already the queue has dropped.
After the end of data the front closes its side of `scored`, and goes on scoring evaluation until it is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.clock import Clock
from asyncrl.errors import FrameError, IllegalTransition, RunError, StreamClosed, TransportError
from asyncrl.messages import GroupId, ScoredGroup, TrajectoryId
from asyncrl.protocols import End, LedgerClient, Receiver, Sender, Teacher, Tracker
from asyncrl.rewards import Item
from asyncrl.scheduling.groups import FailedGroup, GroupAssembler, MemberScore
from asyncrl.services.kept_figures import KeptFigures
from asyncrl.services.reward.dispatch import Batch, Dispatcher, Job, WorkerView
from asyncrl.services.reward.judging import Judging
from asyncrl.services.reward.meter import ScoreMeter
from asyncrl.services.reward.outbox import Outbox
from asyncrl.services.service import NOWHERE, AddressBook, service_rpc
from asyncrl.services.tasks import all_to_end, cancel, first_to_end
from asyncrl.transport.rpc import RpcClient

log = logging.getLogger(__name__)

RECEIVE_ITEMS = 1024
RECEIVE_SECONDS = 1.0
WATCH_SECONDS = 1.0
REPORT_SECONDS = 2.0
DROPPED = ("duplicates", "strays", "late")  # `GroupCounts` of what belongs to no group


class Link(Protocol):
    """A way to call a worker."""

    async def call(self, method: str, *, timeout: float, **params: Any) -> Any: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class FrontParts:
    """What the front works with. `keep_failed` is given each failed group, for whoever keeps samples to read; `kept`: the run's
    reward.jsonl; `teacher`: judges each response, beside the workers; `closers` end what the wiring opened for these parts
    (clients), after the run."""

    receiver: Receiver
    sender: Sender
    ledger: LedgerClient
    tracker: Tracker | None = None
    keep_failed: Callable[[FailedGroup], None] | None = None
    kept: KeptFigures = field(default_factory=KeptFigures)
    teacher: Teacher | None = None
    closers: tuple[Callable[[], Awaitable[None]], ...] = ()


class RewardFront:
    """Row `reward`. parts: called in `run` with everybody's addresses. limit_seconds: `reward.timeout_seconds`, which bounds the
    wait for a worker's answer; num_functions: how many calls a sample takes; with_greedy: each group has a greedy response;
    max_worker_deaths: with a sample, and it failed. silence_seconds: a worker that did not say for this long that it lives, which
    it does once a second, is lost; away_seconds: how long there may be none at all, while some wait to be started again;
    margin_seconds: what a batch may take beyond its calls, replacing a child process included."""

    name = "reward"

    def __init__(
        self,
        parts: Callable[[AddressBook], FrontParts],
        *,
        min_scored: int,
        with_greedy: bool = False,
        limit_seconds: float,
        num_functions: int,
        max_worker_deaths: int = 2,
        max_failed_groups: int = 0,
        silence_seconds: float = 10.0,
        away_seconds: float = 60.0,
        margin_seconds: float = 180.0,
        clock: Clock,
        connect: Callable[[str], Link] = RpcClient,
    ):
        self._make_parts, self._clock, self._connect = parts, clock, connect
        self._call_seconds, self._margin_seconds = num_functions * (limit_seconds + 1.0), margin_seconds
        self._silence_seconds, self._away_seconds = silence_seconds, away_seconds
        self._assembler = GroupAssembler(min_scored, with_greedy=with_greedy)
        self._dispatcher = Dispatcher(max_worker_deaths)
        self._max_failed_groups, self._failed_in_a_row = max_failed_groups, 0
        self._deaths = f"its worker died {max_worker_deaths} times while scoring it"
        self._incarnation = uuid.uuid4().hex
        self._meter = ScoreMeter(clock)
        self._kept = KeptFigures()
        self._judging = Judging(self._call, self._assembler.record, self._teacher_answered)
        self._links: dict[str, Link] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._scored: Outbox[ScoredGroup] = Outbox()
        self._failed: Outbox[FailedGroup] = Outbox()
        self._held: dict[GroupId, None] = {}  # closed here, end not yet accepted
        self._stop = asyncio.Event()
        self._data_ended = False
        self._crash: BaseException | None = None
        self._crashed = asyncio.Event()
        self._state = "starting"
        self._worker_seen = clock.now()
        self._rpc = service_rpc(
            self,
            {
                "register": self.register,
                "score": self.score,
                "in_flight": self.in_flight,
                "incarnation": lambda: self._incarnation,
            },
        )

    # ---- the service -------------------------------------------------------------------------------------------

    async def start(self, earlier: Mapping[str, str] = NOWHERE) -> dict[str, str]:
        address = await self._rpc.start(earlier.get("rpc"))
        return {"rpc": address, "workers": address}

    async def run(self, book: AddressBook) -> None:
        parts = self._make_parts(book)
        self._judging.teacher = parts.teacher
        self._go_on_counting(parts.kept)
        self._state, self._worker_seen = "running", self._clock.now()
        try:
            await first_to_end(self._stop.wait(), self._work(parts), self._watch(parts.tracker), self._raise_crash())
        finally:
            await self._end(parts)

    async def stop(self) -> None:
        self._stop.set()

    def status(self) -> dict[str, Any]:
        return {
            "state": self._state,
            "version": None,
            "workers": self._dispatcher.num_workers,
            "waiting": self._dispatcher.num_waiting,
            "being_scored": self._dispatcher.num_assigned,
            "groups": len(self._assembler.open_groups()) + len(self._held),
            "idle": self._meter.idle_share(),
        }

    def summary(self) -> dict[str, Any]:
        """Of the whole run, and of the groups that have closed: see `meter`."""
        counts = self._meter.counts
        return {
            "idle": {"reward": self._meter.idle_share()},
            "trajectories": {"failed": counts["failed_generation"] + counts["failed_scoring"]},
            "scoring": {
                **counts,
                **self._dropped(),
                "components": self._meter.means(),
                "reasons": self._meter.reasons(),
                "waited_s": self._meter.idle_seconds(),
            },
        }

    # ---- remote calls ------------------------------------------------------------------------------------------

    async def register(
        self, *, worker: str, incarnation: str, address: str, fields: Sequence[str], is_serial: bool, slots: int
    ) -> None:
        """A worker says that it lives. Its first word makes it one of those that get samples; that of another life in its place
        gives back at once what the one before had, and calls on their way to that one end."""
        view = WorkerView(worker, incarnation, address, tuple(fields), is_serial, slots)
        is_new = self._dispatcher.is_new(view)
        self._fail(self._dispatcher.register(view, self._clock.now()), self._deaths)
        if is_new:
            before, self._links[address] = self._links.get(address), self._connect(address)
            if before is not None:
                await before.close()
        self._pump()

    async def score(self, *, items: Sequence[Item]) -> list[dict[str, Any]]:
        """Scores for evaluation, in order: {"score": number or None, "failure": reason or None}. They yield to rollouts."""
        futures = [asyncio.get_running_loop().create_future() for _ in items]
        self._dispatcher.submit([Job(f, item) for f, item in zip(futures, items, strict=True)], evaluation=True)
        self._pump()
        scores: list[MemberScore] = await asyncio.gather(*futures)
        return [{"score": score.reward, "failure": score.failure} for score in scores]

    def in_flight(self) -> list[str]:
        """The groups that are here."""
        return [str(group_id) for group_id in dict.fromkeys((*self._assembler.open_groups(), *self._held))]

    # ---- loops -------------------------------------------------------------------------------------------------

    async def _work(self, parts: FrontParts) -> None:
        """Until the data has ended and everything is sent; then close the stream and wait to be stopped."""
        await all_to_end(self._receive(parts.receiver), self._send(parts.sender), self._give_up(parts))
        try:
            await parts.sender.close()
        except StreamClosed as error:
            log.info("the stream of scored groups had ended before: %s", error)
        self._state = "drained"
        await self._stop.wait()

    async def _receive(self, receiver: Receiver) -> None:
        try:
            while True:
                deliveries = await receiver.receive(max_items=RECEIVE_ITEMS, timeout=RECEIVE_SECONDS)
                self._accept([delivery.message for delivery in deliveries])
        except StreamClosed:
            self._data_ended = True
            self._collect()

    def _accept(self, trajectories: Sequence[Any]) -> None:
        accept = self._assembler.accept
        to_score = [trajectory for trajectory in trajectories if accept(trajectory)]
        self._dispatcher.submit([Job(trajectory.id, vars(trajectory)) for trajectory in to_score])  # see `_score_batch`
        self._judging.ask(to_score)
        self._collect()
        self._pump()

    async def _send(self, sender: Sender) -> None:
        """Send what was scored, all of it at once, in the order it closed."""
        while await self._scored.filled():
            groups = self._scored.take()
            self._meter.blocked(True)
            await sender.send(groups)
            self._meter.blocked(False)
            self._release(groups)

    async def _give_up(self, parts: FrontParts) -> None:
        """Tell the ledger of failed groups. They leave live at once, so this never waits behind a full `scored` topic."""
        while await self._failed.filled():
            groups = self._failed.take()
            await _end_failed(parts.ledger, groups)
            self._release(groups)
            if parts.keep_failed is not None:
                for group in groups:
                    parts.keep_failed(group)

    async def _watch(self, tracker: Tracker | None) -> None:
        """Lose workers that fell silent; refuse to go on without any; report."""
        reported = self._clock.now()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = self._clock.now()
            for name in self._dispatcher.silent(now, self._silence_seconds):
                log.warning("%s was silent for %.0f s: its samples go to another", name, self._silence_seconds)
                self._fail(self._dispatcher.lose(name), self._deaths)
            if self._dispatcher.num_workers:
                self._worker_seen = now
            elif self._dispatcher.num_waiting and now - self._worker_seen > self._away_seconds:
                raise RunError(
                    f"no reward worker for {self._away_seconds:.0f} s (twice cluster.start_timeout_seconds): read "
                    "logs/reward-0.log"
                )
            if tracker is not None and now - reported >= REPORT_SECONDS:
                reported = now
                self._report(tracker)
            self._pump()

    # ---- steps -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send every batch that can be sent."""
        while (batch := self._dispatcher.assign()) is not None:
            self._call(self._score_batch(batch))
        self._meter.busy(self._dispatcher.num_waiting + self._dispatcher.num_assigned + self._judging.num_waiting > 0)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        call = asyncio.create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._call_ended)

    def _teacher_answered(self) -> None:
        self._collect()
        self._pump()

    async def _score_batch(self, batch: Batch) -> None:
        fields = batch.worker.fields  # of all that a job has, what some function takes
        items = [{field: job.item.get(field) for field in fields} for job in batch.jobs]
        timeout = self._call_seconds * 2 * max(self._dispatcher.num_assigned, 1) + self._margin_seconds
        try:
            link = self._links[batch.worker.address]
            answer = await link.call("score", timeout=timeout, items=items, incarnation=batch.worker.incarnation)
        except (TransportError, FrameError) as error:
            if self._dispatcher.holds(batch):
                log.warning("%s did not score %d samples: %s", batch.worker.name, len(batch.jobs), error)
                self._fail(self._dispatcher.give_up(batch), f"reward worker failed ({error})")
        else:
            if self._dispatcher.finish(batch, answer["seconds"]):
                self._record(batch.jobs, [MemberScore(*score) for score in answer["scores"]])
        self._pump()

    def _call_ended(self, call: asyncio.Task[None]) -> None:
        """A bug in handling an answer ends the service; it must not look like a sample that never comes back."""
        self._calls.discard(call)
        if not call.cancelled() and call.exception() is not None:
            self._crash = call.exception()
            self._crashed.set()

    async def _raise_crash(self) -> None:
        await self._crashed.wait()
        assert self._crash is not None
        raise self._crash

    def _fail(self, jobs: Sequence[Job], reason: str) -> None:
        self._record(jobs, [MemberScore(None, failure=reason)] * len(jobs))

    def _record(self, jobs: Sequence[Job], scores: Sequence[MemberScore]) -> None:
        for job, score in zip(jobs, scores, strict=True):
            if isinstance(job.key, TrajectoryId):
                self._judging.scored(job.key, score)
            elif isinstance(job.key, asyncio.Future) and not job.key.done():
                job.key.set_result(score)
        self._collect()

    def _collect(self) -> None:
        """Move what has closed to its way out; after the end of data, and of scoring, that was all."""
        ended = self._data_ended and not self._assembler.num_unscored
        if ended:
            self._assembler.close_incomplete()
        closed = self._assembler.take_closed()
        for group in closed:
            self._held[group.id] = None
            self._meter.count(group)
            if isinstance(group, ScoredGroup):
                self._failed_in_a_row = 0
                self._scored.put(group)
            else:
                self._failed_in_a_row += 1
                self._failed.put(group)
                self._end_where_nothing_is_scored(group)
        if closed:
            self._keep()  # before any of them leaves
        if ended:
            self._scored.end()
            self._failed.end()

    def _end_where_nothing_is_scored(self, group: FailedGroup) -> None:
        if not self._max_failed_groups or self._failed_in_a_row != self._max_failed_groups:
            return
        self._crash = RunError(
            f"{self._failed_in_a_row} groups in a row failed, and none was scored (reward.max_failed_groups); the last, "
            f"{group.id}: {group.reason}; read them with `asyncrl samples RUN --state failed`, and mend the reward or the "
            "generation"
        )
        self._crashed.set()

    def _release(self, groups: Sequence[ScoredGroup | FailedGroup]) -> None:
        for group in groups:
            del self._held[group.id]

    def _go_on_counting(self, kept: KeptFigures) -> None:
        """From where an earlier front of this run was."""
        self._kept, earlier = kept, kept.recall()
        self._meter.begin(earlier)
        for name in DROPPED:
            setattr(self._assembler.counts, name, earlier.get(name, 0))

    def _keep(self) -> None:
        self._kept.keep({**self._meter.kept(self._held), **self._dropped()})

    def _dropped(self) -> dict[str, int]:
        return {name: getattr(self._assembler.counts, name) for name in DROPPED}

    def _report(self, tracker: Tracker) -> None:
        self._keep()
        counts = self._meter.counts
        tracker.log(
            "scoring",
            counts["groups_scored"] + counts["groups_failed"],
            {
                "idle/reward": self._meter.idle_share(),
                "scoring/waiting": float(self._dispatcher.num_waiting),
                "scoring/failed": float(counts["failed_scoring"]),
                "scoring/seconds_per_sample": self._dispatcher.seconds_per_sample or 0.0,
                **{f"scoring/{name}": value for name, value in self._meter.means().items()},
            },
        )

    async def _end(self, parts: FrontParts) -> None:
        self._state = "done"
        await cancel(list(self._calls))
        for link in self._links.values():
            await link.close()
        if parts.tracker is not None:
            self._report(parts.tracker)
            await parts.tracker.close()
        self._kept.close()
        await parts.receiver.close()
        if parts.teacher is not None:
            await parts.teacher.close()
        for close in parts.closers:
            await close()
        await self._rpc.close()


async def _end_failed(ledger: LedgerClient, groups: Sequence[FailedGroup]) -> None:
    """These groups have failed; one that has another end by now, said by a front before this one, keeps that."""
    ends = [End(group.id, "failed", group.reason) for group in groups]
    try:
        await ledger.end(ends)
    except IllegalTransition:
        for end in ends:
            try:
                await ledger.end([end])
            except IllegalTransition as error:
                log.warning("group %s did not fail after all: %s", end.id, error)
