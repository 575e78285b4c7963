"""The supervisor. Its sign, with the picture of its life, is in the package's docstring.

loop             consumes                  waits for                    is unblocked by
lives.watch      rows' `run` results       the first to end             a row's end, a silent row, `request_stop`
hearing          rows' summaries           the pause between questions  answers, by a deadline
rpc              status, stop, track       a caller                     the CLI, services' trackers
tracker          metrics                   the hub's own threads        `close`
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl import logs
from asyncrl.clock import Clock
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncrlError, Interrupted, LedgerError, MalformedFrame, ServiceDied
from asyncrl.ledger.store import FILE_NAME, read_ledger, replay, samples
from asyncrl.services.supervisor.lives import Lives
from asyncrl.services.supervisor.runtime import Resume, RowFailed, Runtime, with_the_fleets_word
from asyncrl.services.supervisor.summary import Status, build_summary
from asyncrl.services.tasks import cancel
from asyncrl.transport.rpc import RpcServer

log = logging.getLogger(__name__)


EXIT_CODES: Mapping[Status, int] = {"finished": 0, "failed": 1, "interrupted": 130}
SERVERS_SECONDS = 5.0
EXIT_USER = 2  # a failed run that the user's mistake ended


class Metrics(Protocol):
    """Where the run's figures go: files, MLflow, the terminal (built by the wiring)."""

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None: ...

    def state(self, text: str) -> None: ...

    async def close(self, status: Status, summary: Mapping[str, Any], seconds: float | None = None) -> None: ...

    @property
    def mlflow_run_id(self) -> str | None: ...


class Supervisor:
    """One run, from nothing to summary.json. `supervise` is the whole of it."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        run_id: str,
        runtime: Runtime,
        metrics: Metrics,
        clock: Clock,
        *,
        resume: Resume | None = None,
        at_end: Callable[[], None] = lambda: None,
    ):
        """at_end: the very last thing that is done, once nobody is served any more."""
        self.config, self.run_dir, self.run_id = config, run_dir, run_id
        self.state = "starting"
        self._at_end = at_end
        self._runtime, self._metrics, self._clock = runtime, metrics, clock
        self._lives = Lives(config, run_dir, runtime, clock, resume=resume, say=self._say, changed=self._note)
        self._parts: dict[str, Mapping[str, Any]] = {}
        self._latest: dict[str, float] = {}
        self._known_mlflow_run_id: str | None = None
        self._stop = asyncio.Event()
        self._stop_by: float | None = None
        self._exit_code = EXIT_CODES["failed"]
        self._started_wall = clock.wall()
        self._first_step_wall: float | None = None
        self._resume = resume
        self._evaluations: dict[int, dict[str, float]] = {}
        self._rpc = RpcServer(
            {
                "status": self.status,
                "stop": self.request_stop,
                "track": self.track,
                "evaluations": self.evaluations,
                "book": lambda: self._lives.book,
                "servers": self.servers,
                "add_server": self.add_server,
                "remove_server": self.remove_server,
            }
        )

    # ---- the life of a run -------------------------------------------------------------------------------------

    async def supervise(self) -> dict[str, Any]:
        """Run to the end and return what summary.json holds. Never raises for a failed or interrupted run."""
        end_log = logs.copy_to_file(self.run_dir, "launcher")
        try:
            return await self._supervise()
        finally:
            self._at_end()
            end_log()

    async def _supervise(self) -> dict[str, Any]:
        await self._announce()
        status, error = await self._live()
        self._set_state("stopping")
        await self._whatever_happens("ending the services", self._lives.stop(self._seconds_to_stop(status)))
        await self._whatever_happens("closing the runtime", self._runtime.close())
        await self._whatever_happens("reading the ledger", self._complete_reports())
        summary = self._write_summary(status, error)
        closing = self._metrics.close(summary["status"], summary, self._seconds_left())
        await self._whatever_happens("closing the metrics", closing)
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
            await self._until_stopped(self._lives.bring_up({"rpc": self._rpc.address}))
            self._set_state("running")
            await self._until_stopped(self._lives.watch())
        except Interrupted:
            return "interrupted", None
        except AsyncrlError as failure:
            return "failed", self._explain(failure)
        except Exception as bug:  # the boundary of the run: whatever it is, the services must be ended and the summary written
            log.exception("the supervisor failed")
            return "failed", f"supervisor: {type(bug).__name__}: {bug}"
        return "finished", None

    async def _announce(self) -> None:
        await self._rpc.start()
        self._write_json("run.json", self._whereabouts())

    def _seconds_to_stop(self, status: Status) -> float:
        """What the services get to end by themselves: twice cluster.stop_grace_seconds where their work is over; where it is cut
        short what the stop allows, else the time of a checkpoint besides."""
        grace = self.config.cluster.stop_grace_seconds
        if status == "finished":
            return 2 * grace
        if status == "interrupted" and (left := self._seconds_left()) is not None:
            return left
        saves = status == "interrupted" and self.config.checkpoint.every > 0
        return grace + (self.config.checkpoint.timeout_seconds if saves else 0.0)

    def _seconds_left(self) -> float | None:
        """Of a stop that came with its time; a moment at least."""
        return None if self._stop_by is None else max(1.0, self._stop_by - self._clock.now())

    def _note(self) -> None:
        """Somebody has come up, or is known by now."""
        try:
            self._write_json("run.json", self._whereabouts())
        except OSError as refusal:  # the run goes on: only those who look for it from outside miss something
            log.warning("%s/run.json cannot be written: %s", self.run_dir, refusal)

    def _whereabouts(self) -> dict[str, Any]:
        """How to reach the run while it lives, and what to look for where it does not any more."""
        self._known_mlflow_run_id = self._metrics.mlflow_run_id
        return {
            "pid": os.getpid(),
            "rpc": self._rpc.address,
            "started": self._started_wall,
            "run_id": self.run_id,
            "name": self.config.name,
            "incarnation": self._lives.incarnation,
            "mlflow_run_id": self._known_mlflow_run_id,
            "processes": {name: [int(each["pid"]), each["host"]] for name, each in self._lives.book.items()},
        }

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

    async def _complete_reports(self) -> None:
        """A row that did not give its last summary leaves the one that was heard last; what the ledger's file says goes over it,
        where the queue or rank 0 could not say it."""
        lost = {"message_queue", "trainer/0"} - self._lives.summaries.keys()
        self._parts = self._lives.reports
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
            exit_code=self._exit_code if status == "failed" else EXIT_CODES[status],
            first_step_wall=self._first_step_wall,
            resume=self._resume,
            restarts=self._lives.restarts,
        )

    def _explain(self, failure: AsyncrlError) -> str:
        """The failure in one sentence, then the last lines of the log of the service that it names."""
        if isinstance(failure, RowFailed) and failure.mistake:
            self._exit_code = EXIT_USER
            return f"{failure.row.name}: {failure.reason}"
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

    def request_stop(self, seconds: float | None = None) -> None:
        """End the run soon, as interrupted, with a checkpoint where they are on. seconds: all the time that there is for it."""
        self._stop_by = None if seconds is None else self._clock.now() + seconds
        self._stop.set()

    def track(self, batch: Sequence[Sequence[Any]]) -> None:
        """Metrics from the services: (axis, step, {name: value}) each. Raises MalformedFrame, and nothing of the batch counts,
        where one is something else: figures that no store takes would cost that store all later ones."""
        for record in batch:
            if not _is_record(record):
                raise MalformedFrame(f"metrics are [axis, step, {{name: number}}], found {record!r:.80}")
        for axis, step, metrics in batch:
            self._latest.update(metrics)
            if axis == "eval":
                self._evaluations[step] = dict(metrics)
            if axis == "trainer":
                self._first_step_wall = self._first_step_wall or self._clock.wall()
                self._lives.policy.step_finished(step)
            self._metrics.log(axis, step, metrics)
        if self._metrics.mlflow_run_id != self._known_mlflow_run_id:
            self._note()

    def evaluations(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of that metric of every evaluation that this launch of the run has seen."""
        return [(step, metrics[name]) for step, metrics in self._evaluations.items() if name in metrics]

    async def servers(self) -> list[dict[str, Any]]:
        """The inference servers, as ParameterSync knows them."""
        found: list[dict[str, Any]] = await self._lives.client("parameter_sync").call("servers", timeout=SERVERS_SECONDS)
        return found

    async def add_server(self, url: str, receiver: str | None) -> str:
        """Have a running SGLang server take part; its name. Raises UserError for one that does not fit this run."""
        return await self._lives.add_server(url, receiver)

    async def remove_server(self, name: str) -> None:
        """Take a server out of the run. Raises UserError for one that is not there, and for the last."""
        await self._lives.remove_server(name)

    async def status(self) -> dict[str, Any]:
        """The run's state, one row per process, and the newest figures."""
        services = with_the_fleets_word(await asyncio.gather(*(self._lives.status(row) for row in self._lives.rows)))
        return {
            "state": self.state,
            "name": self.config.name,
            "run_id": self.run_id,
            "step": int(self._latest.get("step", 0)),
            "steps": self.config.training.steps,
            "restarts": self._lives.restarts,
            "elapsed_s": round(self._clock.wall() - self._started_wall, 1),
            "services": services,
            "metrics": dict(self._latest),
        }

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


def _is_record(record: Any) -> bool:
    match record:
        case [str(), int(), {**metrics}]:
            return all(type(name) is str and type(value) in (int, float) for name, value in metrics.items())
    return False
