"""The supervisor. Its sign, with the picture of its life, is in the package's docstring.

loop             consumes                  waits for                    is unblocked by
_watch           rows' `run` results       the first to end             a row's end, a silent row, `request_stop`
hearing          rows' summaries           the pause between questions  answers, by a deadline
rpc              status, stop, track       a caller                     the CLI, services' trackers
tracker          metrics                   the hub's own threads        `close`
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl import logs
from asyncrl.clock import Clock
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncrlError, Interrupted, LedgerError, RunError, ServiceDied, StartTimeout, TransportError
from asyncrl.ledger.store import FILE_NAME, read_ledger, replay, samples
from asyncrl.services.supervisor.hearing import Hearing
from asyncrl.services.supervisor.runtime import STOP_ORDER, Row, RowFailed, Runtime, rows_of
from asyncrl.services.supervisor.summary import Status, build_summary
from asyncrl.services.supervisor.verdict import root_cause
from asyncrl.services.tasks import all_to_end, cancel
from asyncrl.transport.rpc import RpcClient, RpcServer

log = logging.getLogger(__name__)

SETTLE_SECONDS = 2.0  # after a first failure: time for the true cause to show
STATUS_SECONDS = 2.0  # a service that does not answer within this is shown as not answering


class Metrics(Protocol):
    """Where the run's figures go: files, MLflow, the terminal (built by the wiring)."""

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None: ...

    def state(self, text: str) -> None: ...

    async def close(self, status: Status, summary: Mapping[str, Any]) -> None: ...

    @property
    def mlflow_run_id(self) -> str | None: ...


class Supervisor:
    """One run, from nothing to summary.json. `supervise` is the whole of it."""

    def __init__(self, config: Config, run_dir: Path, run_id: str, runtime: Runtime, metrics: Metrics, clock: Clock):
        self.config, self.run_dir, self.run_id = config, run_dir, run_id
        self.state = "starting"
        self._runtime, self._metrics, self._clock = runtime, metrics, clock
        self._rows = rows_of(config)
        self._book: dict[str, dict[str, str]] = {}
        self._parts: dict[str, Mapping[str, Any]] = {}
        self._runs: dict[asyncio.Task[Mapping[str, Any]], Row] = {}
        self._clients: dict[str, RpcClient] = {}
        self._latest: dict[str, float] = {}
        self._hearing = Hearing(self._ask_for_summary)
        self._stop = asyncio.Event()
        self._started_wall = clock.wall()
        self._rpc = RpcServer({"status": self.status, "stop": self.request_stop, "track": self.track, "book": lambda: self._book})

    # ---- the life of a run -------------------------------------------------------------------------------------

    async def supervise(self) -> dict[str, Any]:
        """Run to the end and return what summary.json holds. Never raises for a failed or interrupted run."""
        end_log = logs.copy_to_file(self.run_dir, "launcher")
        try:
            return await self._supervise()
        finally:
            end_log()

    async def _supervise(self) -> dict[str, Any]:
        await self._announce()
        status, error = await self._live()
        self._set_state("stopping")
        await self._whatever_happens("ending the services", self._end_services(patient=status == "finished"))
        await self._whatever_happens("closing the runtime", self._runtime.close())
        await self._whatever_happens("reading the ledger", self._complete_reports())
        summary = self._write_summary(status, error)
        await self._whatever_happens("closing the metrics", self._metrics.close(summary["status"], summary))
        summary = self._write_summary(status, error)  # the MLflow run id is known now, and the wall time
        await self._rpc.close()
        return summary

    async def _whatever_happens(self, what: str, work: Awaitable[None]) -> None:
        """One of the last steps; the others follow it in any case."""
        try:
            await work
        except Exception:  # the boundary of each last step: none may keep processes alive or the summary unwritten
            log.exception("%s failed", what)

    async def _live(self) -> tuple[Status, str | None]:
        try:
            await self._until_stopped(self._bring_up())
            self._set_state("running")
            await self._watch()
        except Interrupted:
            return "interrupted", None
        except (RunError, RowFailed) as failure:
            return "failed", self._explain(failure)
        except Exception as bug:  # the boundary of the run: whatever it is, the services must be ended and the summary written
            log.exception("the supervisor failed")
            return "failed", f"supervisor: {type(bug).__name__}: {bug}"
        return "finished", None

    async def _announce(self) -> None:
        address = await self._rpc.start()
        started = {
            "pid": os.getpid(),
            "rpc": address,
            "started": self._started_wall,
            "run_id": self.run_id,
            "name": self.config.name,
        }
        self._write_json("run.json", started)

    async def _bring_up(self) -> None:
        """Place and start every row by `cluster.start_timeout_seconds`, naming those that did not come up."""
        seconds = self.config.cluster.start_timeout_seconds
        pending: set[str] = {row.name for row in self._rows}
        try:
            async with asyncio.timeout(seconds):
                await self._runtime.open()
                for row in self._rows:
                    self._runtime.place(row)
                model = asyncio.ensure_future(self._runtime.prepare_model())
                try:
                    await all_to_end(*(self._start(row, model, pending) for row in self._rows))
                finally:
                    await cancel([model])
        except TimeoutError:
            raise StartTimeout(sorted(pending), seconds) from None
        self._runs = {asyncio.ensure_future(self._runtime.run(row, self._full_book())): row for row in self._rows}

    async def _start(self, row: Row, model: asyncio.Future[None], pending: set[str]) -> None:
        if row.role in ("trainer", "inference"):
            await asyncio.shield(model)
        self._book[row.name] = await self._runtime.start(row)
        pending.discard(row.name)
        self._say(f"{len(self._rows) - len(pending)}/{len(self._rows)} services up")

    def _full_book(self) -> dict[str, dict[str, str]]:
        return {**self._book, "supervisor": {"rpc": self._rpc.address}}

    async def _watch(self) -> None:
        """Return when trainer and rollouter are done; raise for a failed or silent row, or when a stop is asked."""
        silence = asyncio.ensure_future(self._hearing.until_silent(self._runs.values))
        try:
            while any(row.decides_the_end for row in self._runs.values()):
                done, _ = await self._until_stopped(asyncio.wait((*self._runs, silence), return_when=asyncio.FIRST_COMPLETED))
                failures = self._collect(done - {silence})
                if failures:
                    failures += await self._failures_that_follow()
                    raise self._hearing.culprit(failures, self._runs.values()) or root_cause(failures)
                if silence in done:
                    raise silence.result()
        finally:
            await cancel([silence])

    async def _failures_that_follow(self) -> list[RowFailed]:
        """What else fails within a moment, so that the cause can be told from its echoes."""
        if not self._runs:
            return []
        done, _ = await asyncio.wait(self._runs, timeout=SETTLE_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        return self._collect(done)

    def _collect(self, done: set[asyncio.Task[Mapping[str, Any]]]) -> list[RowFailed]:
        failures = []
        for task in done:
            row = self._runs.pop(task)
            failure = task.exception()
            if failure is None:
                self._parts[row.name] = task.result()
            else:
                failures.append(failure if isinstance(failure, RowFailed) else RowFailed(row, repr(failure), lost=False))
        return failures

    async def _until_stopped(self, work: Any) -> Any:
        """Await `work`, unless a stop is asked first: then Interrupted."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted("stop was asked")
        finally:
            await cancel([stop, task] if not task.done() else [stop])

    # ---- the end of a run --------------------------------------------------------------------------------------

    async def _end_services(self, *, patient: bool) -> None:
        """Ask the rows to stop, role by role in STOP_ORDER; kill what is still there after the grace."""
        grace = self.config.cluster.stop_grace_seconds
        deadline = self._clock.now() + (2 * grace if patient else grace)
        for role in STOP_ORDER:
            tasks = [task for task, row in self._runs.items() if row.role == role]
            if not tasks:
                continue
            rows = [self._runs[task] for task in tasks]
            await self._hearing.ask(rows, STATUS_SECONDS)
            await asyncio.gather(*map(self._ask_to_stop, rows))
            left = max(deadline - self._clock.now(), 1.0)
            done, late = await asyncio.wait(tasks, timeout=left)
            for failure in self._collect(done):
                log.warning("while stopping: %s", failure)
            for task in late:
                log.warning("%s did not stop within %.0f s (cluster.stop_grace_seconds): killed", self._runs[task].name, left)
                self._runtime.kill(self._runs[task])
        await cancel(list(self._runs))
        for client in self._clients.values():
            await client.close()

    async def _ask_to_stop(self, row: Row) -> None:
        try:
            await self._client(row.name).call("stop", timeout=STATUS_SECONDS)
        except TransportError as silent:
            log.warning("%s did not take the request to stop: %s", row.name, silent)

    async def _ask_for_summary(self, row: Row, timeout: float) -> Mapping[str, Any]:
        summary: Mapping[str, Any] = await self._client(row.name).call("summary", timeout=timeout)
        return summary

    async def _complete_reports(self) -> None:
        """A row that did not give its last summary leaves the one that was heard last; what the ledger's file says goes over it,
        where the queue or rank 0 could not say it."""
        lost = {"message_queue", "trainer/0"} - self._parts.keys()
        self._parts = {**self._hearing.reports, **self._parts}
        ledger = self.run_dir / FILE_NAME
        if not lost or not ledger.exists():
            return
        try:
            attempts = await asyncio.to_thread(lambda: replay(read_ledger(ledger)))
        except LedgerError as error:
            log.warning("the summary's samples are those heard last: %s", error)
            return
        self._add_to_part("message_queue", {"samples": samples(attempts)})
        self._add_to_part("trainer/0", {"steps": attempts.finished_steps})

    def _add_to_part(self, name: str, figures: Mapping[str, Any]) -> None:
        self._parts[name] = {**self._parts.get(name, {}), **figures}

    def _write_summary(self, status: Status, error: str | None) -> dict[str, Any]:
        """A summary that cannot be written is a failure of the run, whatever became of it otherwise."""
        summary = self._summary(status, error)
        try:
            self._write_json("summary.json", summary)
        except OSError as refusal:
            unwritten = f"{self.run_dir}/summary.json cannot be written ({refusal.strerror or refusal}): see that the folder is "
            unwritten += "there, that its disk has room, and that you may write to it"
            log.error("%s", unwritten)
            summary = self._summary("failed", f"{error}\n{unwritten}" if error else unwritten)
        return summary

    def _summary(self, status: Status, error: str | None) -> dict[str, Any]:
        return build_summary(
            self.config,
            self._parts,
            status=status,
            error=error,
            started_wall=self._started_wall,
            ended_wall=self._clock.wall(),
            mlflow_run_id=self._metrics.mlflow_run_id,
        )

    def _explain(self, failure: AsyncrlError) -> str:
        """The failure in one sentence, then the last lines of the log of the service that it names."""
        if isinstance(failure, RowFailed):
            failure = ServiceDied(failure.row.name, failure.reason, logs.tail(self.run_dir, failure.row.name))
        lines = [str(failure)]
        if isinstance(failure, ServiceDied) and failure.log_tail:
            lines += [
                f"last lines of {logs.log_path(self.run_dir, failure.service)}:",
                *(f"  {line}" for line in failure.log_tail),
            ]
        return "\n".join(lines)

    # ---- remote calls ------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """End the run soon, as interrupted."""
        self._stop.set()

    def track(self, batch: Sequence[Sequence[Any]]) -> None:
        """Metrics from the services: (axis, step, {name: value}) each."""
        for axis, step, metrics in batch:
            self._latest.update(metrics)
            self._metrics.log(axis, step, metrics)

    async def status(self) -> dict[str, Any]:
        """The run's state, one row per process, and the newest figures."""
        services = await asyncio.gather(*(self._row_status(row) for row in self._rows))
        return {
            "state": self.state,
            "name": self.config.name,
            "run_id": self.run_id,
            "step": int(self._latest.get("step", 0)),
            "steps": self.config.training.steps,
            "elapsed_s": round(self._clock.wall() - self._started_wall, 1),
            "services": services,
            "metrics": dict(self._latest),
        }

    async def _row_status(self, row: Row) -> dict[str, Any]:
        known = self._book.get(row.name)
        if known is None:
            return {"name": row.name, "pid": None, "host": None, "state": "STARTING", "version": None}
        silent = {"name": row.name, "pid": int(known["pid"]), "host": known["host"], "version": None}
        if row.name in self._parts:
            return {**silent, "state": "DONE"}
        try:
            return {**silent, **await self._client(row.name).call("status", timeout=STATUS_SECONDS)}
        except TransportError:
            return {**silent, "state": "SILENT"}

    def _client(self, name: str) -> RpcClient:
        if name not in self._clients:
            self._clients[name] = RpcClient(self._book[name]["rpc"])
        return self._clients[name]

    def _set_state(self, state: str) -> None:
        self.state = state
        self._say(state)

    def _say(self, text: str) -> None:
        try:
            self._metrics.state(text)
        except Exception:  # boundary: a terminal that is gone (`launch | head`) is no reason to end a run
            log.debug("nobody hears %r", text, exc_info=True)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Whole or not at all: written aside, then renamed."""
        aside = self.run_dir / f".{name}.new"
        aside.write_text(json.dumps(value, indent=2) + "\n")
        aside.replace(self.run_dir / name)
