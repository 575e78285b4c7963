"""When a checkpoint is begun, committed or given up. At most one is under way.

    step end ─ due? ─▶ begin (ranks copy aside) ─▶ … steps go on …
    step end, or a tick: written? ─▶ files and ledger synced ─▶ commit ─▶ prune ─▶ ledger
                          failed? ─▶ said, counted, removed

A checkpoint that comes due while one is under way waits its turn. A failed one costs itself alone: the run goes on, and the next
is begun when it is due.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.checkpoint import CheckpointInfo, Checkpoints
from asyncrl.checkpoint.durable import in_words
from asyncrl.checkpoint.folders import WRITING
from asyncrl.clock import Clock
from asyncrl.config.schema import CheckpointConfig
from asyncrl.errors import CheckpointError, LedgerError, TransportError
from asyncrl.services.trainer.parts import LeaderParts, RunBlocking
from asyncrl.services.trainer.ranks import Ranks

log = logging.getLogger(__name__)

EVALUATION = "eval/"


@dataclass(frozen=True)
class UnderWay:
    """A save that was begun: `state` is what state.json will say, as of the step."""

    step: int
    state: Mapping[str, Any]
    began: float
    held_seconds: float


class Saving:
    """The leader's checkpoints."""

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        ranks: Ranks,
        parts: LeaderParts,
        *,
        sync_records: Callable[[], None],
        clock: Clock,
        run_blocking: RunBlocking,
    ):
        """sync_records: brings the trainer's files to the disk; may raise OSError."""
        self._run_dir, self._sync_records = run_dir, sync_records
        self._config, self._ranks, self._parts, self._clock, self._run_blocking = config, ranks, parts, clock, run_blocking
        self._checkpoints = Checkpoints(run_dir, keep=config.keep, best=config.best)
        self._under_way: UnderWay | None = None
        self._last_begun = 0
        self._values: dict[int, float] = {}
        self._fresh: dict[str, float] = {}
        self.last_committed: int | None = None
        self.failed = 0
        self._last_failure: str | None = None

    async def begin_run(self, resume: CheckpointInfo | None) -> None:
        """Remove what an earlier life left half written, or saved of a future that will not be; take the state that the run goes
        on from. Raises CheckpointError for a checkpoint that cannot be loaded."""
        await self._run_blocking(self._checkpoints.sweep_incomplete)
        if resume is not None:
            log.info("going on from the checkpoint of step %d: %s", resume.step, resume.folder)
            await self._ranks.load(str(resume.folder))
            self._last_begun = self.last_committed = resume.step
            self.failed = int(resume.state.get("checkpoints_failed", 0))
        await self._run_blocking(self._checkpoints.forget_after, self._last_begun)

    async def after_step(self, step: int, metrics: Mapping[str, float], state: Callable[[], Mapping[str, Any]]) -> None:
        """A step is finished, and everything of it is recorded."""
        if not self._config.every:
            return
        await self.look()
        if self._under_way is None and step // self._config.every > self._last_begun // self._config.every:
            await self._begin(step, metrics, state)

    async def look(self) -> None:
        """Commit what is written; give up what is not written in time. Waits for nothing else."""
        if self._under_way is None:
            return
        left = self._under_way.began + self._config.timeout_seconds - self._clock.now()
        if left <= 0 or self._ranks.save_done():
            await self._finish(max(0.0, left))

    async def begin_last(self, step: int, metrics: Mapping[str, float], state: Callable[[], Mapping[str, Any]]) -> None:
        """No step will follow: let the last one's checkpoint begin, if it can at once."""
        await self.look()
        if self._config.every and self._under_way is None and step > self._last_begun:
            await self._begin(step, metrics, state)

    async def end_run(
        self, step: int, metrics: Mapping[str, float], state: Callable[[], Mapping[str, Any]], *, seconds: float
    ) -> None:
        """Wait for what is under way, and see that the last step has its checkpoint; at most `seconds` long."""
        deadline = self._clock.now() + seconds
        await self._finish(seconds)
        await self.begin_last(step, metrics, state)
        await self._finish(max(0.0, deadline - self._clock.now()))
        if self._fresh:
            self._parts.tracker.log("trainer", step, self.metrics())

    def metrics(self) -> dict[str, float]:
        """Of the checkpoint that was committed since the last call, and how many failed so far."""
        fresh, self._fresh = self._fresh, {}
        return {**fresh, "checkpoint/failed": float(self.failed)} if self._config.every else {}

    def status(self) -> dict[str, Any]:
        """The newest one, how many failed in the run so far, and why the last of those did, as far as this process knows."""
        if not self._config.every:
            return {}
        return {
            "checkpoint": self.last_committed,
            "checkpoints_failed": self.failed,
            "checkpoint_error": self._last_failure,
        }

    # ---- one checkpoint ----------------------------------------------------------------------------------------

    async def _begin(self, step: int, metrics: Mapping[str, float], state: Callable[[], Mapping[str, Any]]) -> None:
        self._last_begun = step
        best = self._config.best
        value = metrics.get(best) if best is not None else None
        if value is not None and math.isfinite(value):
            self._values[step] = value
        elif best is not None and not best.startswith(EVALUATION):
            log.warning("checkpoint.best is %s, and step %d has no such metric: this checkpoint cannot be the best", best, step)
        try:
            folder = await self._run_blocking(self._checkpoints.begin, step)
        except CheckpointError as error:
            self._count_failure(step, error)
            return
        whole = {
            **state(),
            "checkpoints_failed": self.failed,
            "best": None if best is None else {"metric": best, "value": self._values.get(step)},
        }
        held = await self._ranks.begin_save(str(folder))
        self._under_way = UnderWay(step, whole, self._clock.now(), held)

    async def _finish(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for the one under way, if there is one."""
        save, self._under_way = self._under_way, None
        if save is None:
            return
        try:
            seconds = await self._ranks.finish_save(timeout)
            await self._sync_what_it_goes_on_from()
            info = await self._run_blocking(self._checkpoints.commit, save.step, save.state)
        except CheckpointError as error:
            self._count_failure(save.step, error)
            await self._run_blocking(self._checkpoints.abandon, save.step)
            return
        self.last_committed = save.step
        self._fresh = {
            "checkpoint/seconds": seconds,
            "checkpoint/held_ms": 1000 * save.held_seconds,
            "checkpoint/bytes": float(info.bytes),
        }
        log.info("checkpoint of step %d: %d bytes, written in %.2f s beside training", save.step, info.bytes, seconds)
        await self._prune()
        await self._parts.ledger.checkpointed(save.step)

    async def _sync_what_it_goes_on_from(self) -> None:
        """Ledger and files have the steps that the checkpoint has, also after a power cut: else it could not be gone on from.
        Raises CheckpointError."""
        try:
            await self._run_blocking(self._sync_records)
            await self._parts.ledger.sync()
        except OSError as error:
            raise in_words(error, WRITING, self._run_dir) from error
        except LedgerError as error:
            raise CheckpointError(str(error)) from error

    async def _prune(self) -> None:
        try:
            await self._run_blocking(self._checkpoints.record, await self._best_values())
        except CheckpointError as error:
            log.warning("%s", error)
        await self._run_blocking(self._checkpoints.prune)

    async def _best_values(self) -> Mapping[int, float]:
        best = self._config.best
        if best is None or not best.startswith(EVALUATION) or self._parts.evaluations is None:
            return self._values
        try:
            return await self._parts.evaluations(best)
        except TransportError as error:
            log.warning("the values of %s (checkpoint.best) could not be asked for: %s", best, error)
            return {}

    def _count_failure(self, step: int, error: CheckpointError) -> None:
        self.failed += 1
        self._last_failure = f"step {step}: {error}"
        log.warning("the checkpoint of step %d failed, and the run goes on without it: %s", step, error)
