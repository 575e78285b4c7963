"""The processes of a run: started together, watched, started again where one is lost, ended in order.

    bring_up ─▶ place + start every row (deadline) ─▶ run ─▶ watch ─┬─ trainer and rollouter done ─▶ returns
                                                            ▲       ├─ a service raised            ─▶ RowFailed
                                                            └───────┴─ processes lost, or silent ─▶ policy ─▶ end, start, run

What is decided is in `restarts` and `verdict`, pure. At every moment each row has at most one process, and `book` says where it
is, or where the next one will be.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.checkpoint import Checkpoints
from asyncrl.clock import Clock
from asyncrl.config.schema import Config
from asyncrl.errors import RemoteError, RunError, StartTimeout, TransportError, UserError
from asyncrl.services.supervisor.hearing import Hearing
from asyncrl.services.supervisor.restarts import GiveUp, RestartPlan, RestartPolicy
from asyncrl.services.supervisor.runtime import STOP_ORDER, Life, Resume, Row, RowFailed, Runtime, rows_of
from asyncrl.services.supervisor.verdict import root_cause
from asyncrl.services.tasks import all_to_end, cancel
from asyncrl.transport.rpc import RpcClient

log = logging.getLogger(__name__)

SETTLE_SECONDS = 2.0  # after a failure that ends the run: time for the true cause to show
LOSSES_SETTLE_SECONDS = 0.5  # after a lost process: time for those to show that were lost with it
CALL_SECONDS = 2.0  # a service that does not answer within this is not answering
LEADER = "trainer/0"
LAST_WORDS_SECONDS = 2.0  # of the time that the trainer is given to stop, for what follows its last checkpoint


class Lives:
    """Rows, their addresses and their ends. `changed()` is called whenever a process has come up; `say(text)` is for people."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        runtime: Runtime,
        clock: Clock,
        *,
        resume: Resume | None = None,
        say: Callable[[str], None] = lambda text: None,
        changed: Callable[[], None] = lambda: None,
    ):
        self.rows = rows_of(config)
        self.book: dict[str, dict[str, str]] = {}
        self.summaries: dict[str, Mapping[str, Any]] = {}
        self._added: dict[str, dict[str, str]] = {}  # servers that joined the run: their addresses
        self._removed: set[str] = set()
        self.incarnation = resume.incarnation if resume is not None else 1
        self.restarts = 0
        self.policy = RestartPolicy(config, self.rows)
        self._config, self._run_dir, self._runtime, self._clock = config, run_dir, runtime, clock
        self._resume, self._say, self._changed = resume, say, changed
        self._launched, self._earlier_s = clock.wall(), resume.wall_s if resume is not None else 0.0
        self._runs: dict[asyncio.Task[Mapping[str, Any]], Row] = {}
        self._clients: dict[str, RpcClient] = {}
        self._supervisor: dict[str, str] = {}
        self._announcing: asyncio.Future[None] | None = None
        self._hearing = Hearing(self._ask_for_summary, config.cluster.silence_seconds)

    # ---- up ----------------------------------------------------------------------------------------------------

    async def bring_up(self, supervisor: Mapping[str, str]) -> None:
        """Open the runtime, then place and start every row, by `cluster.start_timeout_seconds`; names those that did not come up.
        supervisor: its own addresses, for everybody's book."""
        self._supervisor = dict(supervisor)
        pending = {row.name for row in self.rows}
        seconds = self._config.cluster.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._runtime.open()
                for row in self.rows:
                    self._runtime.place(row, self._first_life(row))
                model = asyncio.ensure_future(self._runtime.prepare_model())
                try:
                    await all_to_end(*(self._start(row, pending, model) for row in self.rows))
                finally:
                    await cancel([model])
        except TimeoutError:
            raise StartTimeout(sorted(pending), seconds) from None
        self._run(self.rows)

    def _first_life(self, row: Row) -> Life:
        began = Life(self.incarnation, launched=self._launched, earlier_s=self._earlier_s)
        if self._resume is None:
            return began
        return replace(began, checkpoint=self._resume.checkpoint, set_back_to=self._resume.step)

    async def _start(self, row: Row, pending: set[str], model: asyncio.Future[None] | None = None) -> None:
        if model is not None and row.role in ("trainer", "inference", "teacher"):
            await asyncio.shield(model)
        self.book[row.name] = await self._runtime.start(row)
        pending.discard(row.name)
        self._changed()
        if model is not None:
            self._say(f"{len(self.rows) - len(pending)}/{len(self.rows)} services up")

    def _run(self, rows: Collection[Row]) -> None:
        book = {**self.book, **self._added, "supervisor": self._supervisor}
        book = {name: addresses for name, addresses in book.items() if name not in self._removed}
        for row in rows:
            self._runs[asyncio.ensure_future(self._runtime.run(row, book))] = row

    # ---- watching ----------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Return when trainer and rollouter are done. Raises RowFailed for a service that raised, or that was lost or silent and
        is not started again."""
        while any(row.decides_the_end for row in self._runs.values()):
            silence = asyncio.ensure_future(self._hearing.until_silent(self._runs.values))
            try:
                await asyncio.wait((*self._runs, silence), return_when=asyncio.FIRST_COMPLETED)
                failures = self._collect({run for run in self._runs if run.done()})
                if not failures and silence.done():
                    failures = [silence.result()]
            finally:
                await cancel([silence])
            if failures:
                await self._go_on_after(failures)

    async def _go_on_after(self, failures: list[RowFailed]) -> None:
        """Start again what was lost, as often as it takes."""
        unfinished: RestartPlan | None = None
        while failures:
            failures += await self._failures_that_follow(LOSSES_SETTLE_SECONDS)
            lost = {failure.row for failure in failures if failure.lost}
            if not lost:
                failures += await self._failures_that_follow(SETTLE_SECONDS)
                culprit = self._hearing.culprit(failures, self._runs.values())
                if culprit is None:
                    raise root_cause(failures)
                failures, lost = [culprit, *failures], {culprit.row}
            plan = self.policy.after_loss(lost, unfinished)
            cause = root_cause(failures)
            if isinstance(plan, GiveUp):
                cause = next(failure for failure in failures if failure.row == plan.row)
                raise RowFailed(plan.row, f"{cause.reason}; {plan.reason}", lost=True)
            if any(not failure.lost and failure.row not in plan.rows for failure in failures):
                raise cause
            log.warning("%s; starting again: %s", "; ".join(map(str, failures)), ", ".join(row.name for row in plan.rows))
            failures, unfinished = await self._try(plan), plan

    async def _try(self, plan: RestartPlan) -> list[RowFailed]:
        """Carry the plan out; what failed meanwhile."""
        try:
            await self._restart(plan)
        except RowFailed as failure:
            return [failure]
        self.restarts += 1
        return []

    async def _restart(self, plan: RestartPlan) -> None:
        names = {row.name for row in plan.rows}
        seconds = self._config.cluster.start_timeout_seconds
        self._say(f"starting again: {', '.join(sorted(names))}")
        await asyncio.sleep(plan.delay_seconds)
        held = await self._held() if plan.asks_held else None
        await self._end(plan.rows)
        lives = self._lives(plan, held)
        pending = set(names)
        try:
            async with asyncio.timeout(seconds):
                for wave in plan.waves():
                    for row in wave:
                        self._runtime.place(row, lives[row])
                    await all_to_end(*(self._start(row, pending) for row in wave))
        except TimeoutError:
            raise StartTimeout(sorted(pending), seconds) from None
        self._run(plan.rows)
        if plan.reannounces:
            await cancel([self._announcing] if self._announcing is not None else [])
            self._announcing = asyncio.ensure_future(self._reannounce())
        self._say("running")

    def _lives(self, plan: RestartPlan, held: Sequence[str] | None) -> dict[Row, Life]:
        step = checkpoint = None
        if plan.sets_back:
            newest = Checkpoints(self._run_dir).newest_complete()
            step, checkpoint = (0, None) if newest is None else (newest.step, str(newest.folder))
            self.incarnation += 1
        lives = {}
        for row in plan.rows:
            earlier = self.book.get(row.name, {})
            lives[row] = Life(
                self.incarnation,
                earlier,
                checkpoint,
                step,
                tuple(held) if held is not None else None,
                first=False,
                launched=self._launched,
                earlier_s=self._earlier_s,
            )
        return lives

    async def _held(self) -> list[str]:
        """The scored groups in the trainer's hands, by text id. Raises RowFailed when the trainer ends meanwhile."""
        trainer = next((task for task, row in self._runs.items() if row.name == LEADER), None)
        if trainer is None:
            return []
        call = asyncio.ensure_future(self.client(LEADER).call("held", timeout=self._config.queue.reconnect_seconds))
        try:
            await asyncio.wait((call, trainer), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise next(iter(self._collect({trainer})), RunError(f"{LEADER} ended while the queue was started again"))
            held: list[str] = call.result()
        except TransportError as error:
            raise RunError(f"the queue was lost, and {LEADER} does not say what it holds: {error}") from error
        finally:
            await cancel([call])
        return held

    async def _reannounce(self) -> None:
        """Beside everything else: a rank that is lost meanwhile has nothing to say."""
        ranks = [row for row in self._runs.values() if row.role == "trainer"]
        seconds = self._config.sync.timeout_seconds
        try:
            await asyncio.gather(*(self.client(row.name).call("reannounce", timeout=seconds) for row in ranks))
        except TransportError as error:
            log.warning("a trainer rank did not announce itself to the new parameter_sync: %s", error)

    # ---- ends --------------------------------------------------------------------------------------------------

    async def _end(self, rows: Collection[Row]) -> None:
        """These rows' processes are gone afterwards, and what they returned is forgotten."""
        doomed = [task for task, row in self._runs.items() if row in rows]
        await asyncio.gather(*(self._runtime.end(row) for row in rows))
        for task in doomed:
            del self._runs[task]
        await cancel(doomed)
        for row in rows:
            self.summaries.pop(row.name, None)
            self._hearing.forget(row)
            client = self._clients.pop(row.name, None)
            if client is not None:
                await client.close()

    async def stop(self, seconds: float) -> None:
        """Ask the rows to stop, role by role in STOP_ORDER, and kill what is still there after `seconds`, or after
        cluster.stop_grace_seconds, whichever is less; the trainer, which saves its last checkpoint, has all of them."""
        deadline = self._clock.now() + seconds
        for role in STOP_ORDER:
            tasks = [task for task, row in self._runs.items() if row.role == role]
            if not tasks:
                continue
            rows = [self._runs[task] for task in tasks]
            await self._hearing.ask(rows, CALL_SECONDS)
            left = max(deadline - self._clock.now(), 1.0)
            if role != "trainer":
                left = min(left, self._config.cluster.stop_grace_seconds)
            await asyncio.gather(*(self._ask_to_stop(row, left) for row in rows))
            done, late = await asyncio.wait(tasks, timeout=left)
            for failure in self._collect(done):
                log.warning("while stopping: %s", failure)
            for task in late:
                log.warning("%s did not stop within %.0f s: killed", self._runs[task].name, left)
            await asyncio.gather(*(self._runtime.end(self._runs[task]) for task in late))
        await cancel([*self._runs, *([self._announcing] if self._announcing is not None else [])])
        for client in self._clients.values():
            await client.close()

    async def _ask_to_stop(self, row: Row, seconds: float) -> None:
        wish = {"seconds": max(seconds - LAST_WORDS_SECONDS, 0.0)} if row.role == "trainer" else {}
        try:
            await self.client(row.name).call("stop", timeout=CALL_SECONDS, **wish)
        except TransportError as silent:
            log.warning("%s did not take the request to stop: %s", row.name, silent)

    async def _ask_for_summary(self, row: Row, timeout: float) -> Mapping[str, Any]:
        summary: Mapping[str, Any] = await self.client(row.name).call("summary", timeout=timeout)
        return summary

    @property
    def reports(self) -> dict[str, Mapping[str, Any]]:
        """The last summary of every row that gave one, by name."""
        return {**self._hearing.reports, **self.summaries}

    async def _failures_that_follow(self, seconds: float) -> list[RowFailed]:
        """What else fails within a moment, so that the cause can be told from its echoes."""
        if not self._runs:
            return []
        done, _ = await asyncio.wait(self._runs, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        return self._collect(done)

    def _collect(self, done: set[asyncio.Task[Mapping[str, Any]]]) -> list[RowFailed]:
        failures = []
        for task in done:
            row = self._runs.pop(task)
            failure = task.exception()
            if failure is None:
                self.summaries[row.name] = task.result()
            else:
                failures.append(failure if isinstance(failure, RowFailed) else RowFailed(row, repr(failure), lost=False))
        return failures

    # ---- servers that join and leave ---------------------------------------------------------------------------

    async def add_server(self, url: str, receiver: str | None) -> str:
        """A running SGLang server takes part from now on, and once it has confirmed the current version; its name. Nobody here
        starts it again when it dies. Raises UserError."""
        from asyncrl.engines.sglang.process import check_version, server_info
        from asyncrl.transport import security

        self._refuse_where_servers_are_our_own()
        if receiver is None and (self._config.sync.mode == "staged" or self._config.sync.verify):
            raise UserError(
                f"sync.mode is {self._config.sync.mode}{' with sync.verify' if self._config.sync.verify else ''}, which needs "
                "asyncrl's receiver in the server: start it with ASYNCRL_RECEIVER=tcp://HOST:PORT and give that address as "
                "--receiver"
            )
        if url in [addresses.get("http") for addresses in (*self.book.values(), *self._added.values())]:
            raise UserError(f"the run has the server at {url} already: asyncrl servers list")
        check_version(str((await server_info(url, security.door().token)).get("version")), where=url)
        taken = {*self.book, *self._added}
        name = next(f"inference/{index}" for index in itertools.count() if f"inference/{index}" not in taken)
        self._added[name] = {"http": url, **({"weights": receiver} if receiver is not None else {})}
        await self._ask_parameter_sync("add_server", name=name, http=url, weights=receiver or "")
        return name

    async def remove_server(self, name: str) -> None:
        """No request begins there from now on. Raises UserError."""
        self._refuse_where_servers_are_our_own()
        await self._ask_parameter_sync("retire_server", name=name)
        self._removed.add(name)

    def _refuse_where_servers_are_our_own(self) -> None:
        if self._config.inference.engine != "sglang":
            raise UserError(
                "inference.engine is embedded, whose servers are part of the run: set inference.servers and launch it again, or "
                "use inference.engine sglang"
            )

    async def _ask_parameter_sync(self, method: str, **params: Any) -> None:
        try:
            await self.client("parameter_sync").call(method, timeout=self._config.sync.timeout_seconds, **params)
        except RemoteError as error:
            raise UserError(error.text) from error

    # ---- asking ------------------------------------------------------------------------------------------------

    def client(self, name: str) -> RpcClient:
        """A line to a row that has come up."""
        if name not in self._clients:
            self._clients[name] = RpcClient(self.book[name]["rpc"])
        return self._clients[name]

    async def status(self, row: Row) -> dict[str, Any]:
        """One row of `asyncrl status`."""
        known = self.book.get(row.name)
        if known is None:
            return {"name": row.name, "pid": None, "host": None, "state": "starting", "version": None}
        silent = {"name": row.name, "pid": int(known["pid"]), "host": known["host"], "version": None}
        if row.name in self.summaries:
            return {**silent, "state": "done"}
        try:
            return {**silent, **await self.client(row.name).call("status", timeout=CALL_SECONDS)}
        except TransportError:
            return {**silent, "state": "silent"}
