"""The rollouter service.

    ledger ──resume─▶ cursor, live, returned, owed, b
    ledger ──watch──▶ b, ends, reissues ─┐
    fleet  ──watch──▶ v, servers ────────┼─▶ admit ──dispatch──▶ generate × groups ──▶ outbox ──▶ topic rollouts
                                         └─▶ evaluate, in places that rollouts leave free

loop          consumes                   waits for                                      is unblocked by
admit         what comes again, source   the bound, free places, a confirmed version    a step, an end, a member finished
generate ×n   one dispatched group       its responses                                  the servers, or request_timeout_seconds
outbox        finished members           one, then room in the queue                    generate; the Reward front taking messages
watch ledger  ledger events              the next event                                 trainer and Reward front
watch fleet   fleet views                the next view                                  ParameterSync
evaluate      held-out prompts           eval.every steps, then free places             step finished, member finished
report        figures                    a second                                       the clock

Invariant: a group generates only after its dispatch stands in the ledger, and `live < ((min(v + 1 + η)·P, steps) − b)·G`
held when it was dispatched, or, for one that is generated again, when it was restarted. Where η is adapted, it is the one that
stands in the ledger beside b; when it narrows, what is live stays, and nothing starts until it has room again.

A start asks the ledger where the run stands; the first of a run finds nothing there, one in a lost rollouter's place goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from asyncrl.clock import Clock
from asyncrl.config.schema import Config
from asyncrl.data import TableSource, check_longest_prompts
from asyncrl.errors import DeadlineExceeded
from asyncrl.messages import Trajectory
from asyncrl.protocols import FleetView, LedgerEvents, PromptSource, ServerView
from asyncrl.services.kept_figures import KeptFigures
from asyncrl.services.rollouter.admission import Admission, Standing
from asyncrl.services.rollouter.evaluation import Evaluator, is_evaluation
from asyncrl.services.rollouter.figures import Figures
from asyncrl.services.rollouter.generation import Generation, Places
from asyncrl.services.rollouter.groups import GroupTable
from asyncrl.services.rollouter.outbox import Outbox
from asyncrl.services.rollouter.parts import RollouterParts
from asyncrl.services.rollouter.pulse import Pulse
from asyncrl.services.rollouter.quarantine import Sickbay
from asyncrl.services.service import NOWHERE, AddressBook, service_rpc
from asyncrl.services.tasks import first_leaf, first_to_end
from asyncrl.transport.rpc import RpcServer

log = logging.getLogger(__name__)

WATCH_SECONDS = 5.0  # one long poll
REPORT_SECONDS = 1.0
BLOCKED_SECONDS = 2.0
LOOK_AGAIN_SECONDS = 5.0  # every wait for a change looks again after this, whatever was missed


class Rollouter:
    """See the module's docstring, and `Service`. `connect` makes the parts once the others' addresses are known."""

    name = "rollouter"

    def __init__(self, config: Config, connect: Callable[[AddressBook], Awaitable[RollouterParts]], *, clock: Clock):
        self._config, self._connect, self._clock = config, connect, clock
        self._rpc: RpcServer | None = None
        self._state = "starting"
        self._pulse = Pulse()
        self._figures = Figures(clock)
        self._places = Places(config.rollout.max_concurrent, self._places_changed)
        self._groups = GroupTable(config.members_per_group)
        self._confirmed: int | None = None  # by every server that takes traffic; None while none does
        self._servers: tuple[ServerView, ...] = ()
        self._events = LedgerEvents(seq=0, ended=(), finished_steps=0)
        self._stop_asked = False
        self._parts: RollouterParts
        self._kept = KeptFigures()
        self._source: PromptSource
        self._quarantine: Sickbay
        self._admission: Admission
        self._generation: Generation
        self._outbox: Outbox
        self._evaluator: Evaluator | None = None

    async def start(self, earlier: Mapping[str, str] = NOWHERE) -> dict[str, str]:
        self._rpc = service_rpc(self, {"in_flight": self.in_flight})
        return {"rpc": await self._rpc.start(earlier.get("rpc"))}

    async def run(self, book: AddressBook) -> None:
        self._take_parts(await self._connect(book))
        loops = [self._outbox.run, self._watch_ledger, self._watch_fleet, self._report, self._evaluate]
        try:
            await self._resume()
            self._check_data()
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(loop(), name=loop.__name__) for loop in loops]
                await self._work(tasks)
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_leaf(group) from group
        finally:
            self._state = "done"
            await self._close_parts()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        """From the first confirmed version to the end of training."""
        self._state = "waiting for servers"
        while self._confirmed is None and not self._over:
            await self._pulse.wait(LOOK_AGAIN_SECONDS)
        if self._evaluator and not self._over:
            self._state = "evaluating"
            await first_to_end(self._evaluator.evaluate_first(), self._until(lambda: self._over))
        self._state = "generating"
        while not self._over:
            if await self._admission.start_groups(tasks):
                continue
            if self._admission.nothing_will_come:
                await self._outbox.close()
            await self._wait_for_change()
        await self._abort_what_is_left()
        if self._evaluator and not self._stop_asked:
            self._state = "evaluating"
            last = self._evaluator.evaluate_last(self._events.final_version)
            await first_to_end(last, self._until(lambda: self._stop_asked))
        if self._events.training_done:
            await self._outbox.close()  # after a stop the stream has no end: a later start goes on with it
        self._keep()

    async def stop(self) -> None:
        self._stop_asked = True
        self._pulse.beat()

    def status(self) -> dict[str, Any]:
        return {
            "state": self._state,
            "version": self._confirmed,
            "staleness_bound": self._staleness_bound,
            "waiting_for": self._why_waiting() if self._state == "generating" else None,
            "live_groups": self._groups.live,
            "groups_in_flight": self._groups.num_in_flight,
            "generating": self._places.taken,
            "to_be_generated_again": self._groups.num_waiting,
            **self._figures.totals(),
        }

    def summary(self) -> dict[str, Any]:
        self._keep()  # what was said once, no later process takes back
        evaluation = self._evaluator.history.summary() if self._evaluator else {"first": None, "last": None, "history": []}
        return {"eval": evaluation, **self._figures.summary()}

    def in_flight(self) -> list[str]:
        """Ids of the groups that have a member whose trajectory the queue has not accepted yet, from just before their dispatch;
        among them those that wait to be generated again.

        The Reward front's `in_flight` has the groups of which it holds a member; a group may be in both. At rest, with nothing on
        the way in the topic `rollouts`, their union is what the ledger calls in flight.
        """
        return [str(id) for id in self._groups.in_flight()]

    # Waiting

    async def _wait_for_change(self) -> None:
        reason = self._why_waiting()
        self._figures.idle_because(reason)
        with self._figures.waits.waiting(reason):
            await self._pulse.wait(LOOK_AGAIN_SECONDS)

    def _why_waiting(self) -> str:
        """The reason under which idle time is booked."""
        return self._admission.why_waiting if self._state == "generating" else self._state

    def _standing(self) -> Standing:
        is_open = self._state == "generating" and not self._over and not self._outbox.closed
        return Standing(is_open, self._confirmed, self._events.finished_steps, self._staleness_bound)

    @property
    def _staleness_bound(self) -> int:
        return self._config.rollout.staleness_bound(self._events.staleness_bound)

    async def _abort_what_is_left(self) -> None:
        """At a normal end nothing is. The ledger ends what is live when training does, and keeps it as in flight after a stop."""
        rids = [rid for rid in self._parts.agent.active if not is_evaluation(rid)]
        for id in self._groups.in_flight():
            self._generation.cut_short(id)
        if rids:
            log.warning("%d responses were being generated at the end: aborted", len(rids))
            await self._parts.engine.abort(rids)

    # Evaluation

    async def _evaluate(self) -> None:
        """Every eval.every steps, beside the rollouts."""
        if self._evaluator and self._config.eval.every:
            await self._evaluator.run_schedule(over=lambda: self._over)

    async def _until(self, over: Callable[[], bool]) -> None:
        while not over():
            await self._pulse.wait(LOOK_AGAIN_SECONDS)

    # Watching and reporting

    async def _watch_ledger(self) -> None:
        while True:
            try:
                events = await self._parts.ledger.watch(self._events.seq, WATCH_SECONDS)
            except DeadlineExceeded as error:  # a dead process ends the run through the supervisor; a slow one is asked again
                log.warning("the ledger is silent: %s", error)
                continue
            self._events = events
            for id in self._groups.end(events.ended):
                self._generation.cut_short(id)
            self._quarantine.note(events.ended)
            self._pulse.beat()

    async def _watch_fleet(self) -> None:
        seq = -1
        while True:
            try:
                view = await self._parts.fleet.watch(seq, WATCH_SECONDS)
            except DeadlineExceeded as error:
                log.warning("ParameterSync is silent: %s", error)
                continue
            seq, self._confirmed, self._servers = view.seq, _confirmed_by(view), view.servers
            self._parts.on_fleet(view)
            self._pulse.beat()

    async def _report(self) -> None:
        number = 0
        while True:
            due = self._clock.now() + REPORT_SECONDS
            await asyncio.sleep(REPORT_SECONDS)
            if (late := self._clock.now() - due) > BLOCKED_SECONDS:
                log.warning(
                    "the event loop stood still for %.1f s: an agent must not block, use await or asyncio.to_thread", late
                )
            number += 1
            self._keep()
            metrics = {
                **self._figures.report(),
                "rollouter/live_groups": float(self._groups.live),
                "rollouter/groups_in_flight": float(self._groups.num_in_flight),
                "rollouter/waiting_to_send": float(len(self._outbox)),
                "rollouter/quarantined_prompts": float(len(self._quarantine)),
            }
            if self._confirmed is not None:
                metrics["rollouter/confirmed_version"] = float(self._confirmed)
            self._parts.tracker.log("rollouter", number, metrics)

    def _behind(self, version: int) -> list[str]:
        """Servers that have not confirmed this version, those that take no traffic included."""
        behind = [each for each in self._servers if not each.takes_traffic or each.version is None or each.version < version]
        return [each.name for each in behind] if self._servers else ["every server"]

    @property
    def _over(self) -> bool:
        return self._stop_asked or self._events.training_done

    # Parts

    async def _resume(self) -> None:
        """Go on where the run stands. Raises UserError for other data than before, LedgerError, DeadlineExceeded."""
        self._state = "resuming"
        found = await self._parts.ledger.resume_rollouter()
        over = found.final_version is not None
        self._events = LedgerEvents(found.seq, (), found.finished_steps, over, found.final_version, found.staleness_bound)
        self._source = self._parts.open_source(found.cursor)
        self._groups.restore(found.live, found.returned, found.owed)
        rollout, run_dir = self._config.rollout, self._parts.run_dir
        self._quarantine = Sickbay(rollout.quarantine_after, found.failures_by_row, self._source.row, run_dir=run_dir)
        self._admission = Admission(
            self._config,
            source=self._source,
            tokenizer=self._parts.tokenizer,
            ledger=self._parts.ledger,
            groups=self._groups,
            quarantine=self._quarantine,
            generation=self._generation,
            places=self._places,
            standing=self._standing,
        )
        if self._evaluator:
            self._evaluator.history.resume(found.finished_steps)
        if found.cursor is not None:
            log.info(
                "going on after step %d at epoch %d, row %d: %d groups live, %d to be generated again, %d owed",
                *(found.finished_steps, found.cursor.epoch, found.cursor.position),
                *(len(found.live), len(found.returned), len(found.owed)),
            )

    def _take_parts(self, parts: RollouterParts) -> None:
        self._parts = parts
        self._kept = parts.kept
        self._figures.begin(parts.kept.recall())
        self._outbox = Outbox(parts.sender, self._accepted, self._figures.blocked, leaving=self._keep)
        self._generation = Generation(self._config, parts.agent, self._places, self._finished)
        if parts.eval_prompts:
            self._evaluator = Evaluator(
                self._config,
                parts,
                places=self._places,
                room=lambda: self._admission.room_for_evaluation,
                confirmed=lambda: self._confirmed,
                behind=self._behind,
                finished_steps=lambda: self._events.finished_steps,
                pulse=self._pulse,
                clock=self._clock,
            )

    def _keep(self) -> None:
        self._kept.keep(self._figures.kept())

    async def _close_parts(self) -> None:
        self._kept.close()
        await self._parts.engine.close()
        await self._parts.tracker.close()
        for close in self._parts.closers:
            await close()
        if self._rpc is not None:
            await self._rpc.close()

    def _check_data(self) -> None:
        """Refuse rows that the run has no room for, as far as can be seen before anything starts."""
        parts = self._parts
        train = self._source.prompts if isinstance(self._source, TableSource) else ()
        for key, prompts in (("data.train", train), ("data.eval", parts.eval_prompts)):
            check_longest_prompts(
                prompts,
                parts.tokenizer.encode_prompt,
                max_prompt_tokens=self._config.rollout.max_prompt_tokens,
                max_response_tokens=self._config.rollout.max_response_tokens,
                key=key,
            )

    def _finished(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            self._figures.take(trajectory)
            if trajectory.failure is not None:
                log.warning("%s failed: %s", trajectory.id, trajectory.failure)
        self._outbox.put(trajectories)

    def _accepted(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            self._groups.accepted(trajectory.id.group)
        self._pulse.beat()

    def _places_changed(self, taken: int) -> None:
        if not taken:
            self._figures.idle_because(self._why_waiting())
        self._figures.set_active(taken)
        self._pulse.beat()


def _confirmed_by(view: FleetView) -> int | None:
    return view.confirmed if any(server.takes_traffic for server in view.servers) else None
