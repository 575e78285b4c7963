"""The launcher's end of tracking: one stream of records to every place that wants it."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.schema import Config
from asyncrl.protocols import Tracker
from asyncrl.tracking.console import ConsoleProgress
from asyncrl.tracking.facts import flattened, tags
from asyncrl.tracking.mlflow_tracker import FINISH_SECONDS, LOCAL_FINISH_SECONDS, MlflowTracker
from asyncrl.tracking.spool import EndStatus, RunFacts
from asyncrl.tracking.store import absolute_uri

log = logging.getLogger(__name__)

Status = Literal["finished", "failed", "interrupted"]
MLFLOW_STATUS: dict[Status, EndStatus] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class Hub:
    """Fans out to its parts. A part that raises is left out from then on: figures never end a run."""

    def __init__(self, run_dir: Path, *, mlflow: MlflowTracker | None = None, console: ConsoleProgress | None = None):
        self._run_dir, self._mlflow, self._console = run_dir, mlflow, console
        self._parts: list[Tracker] = [part for part in (mlflow, console) if part is not None]

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        for part in list(self._parts):
            try:
                part.log(axis, step, metrics)
            except Exception:  # boundary: a broken terminal or disk is no reason to end a run
                log.exception("%s failed, and gets no more metrics", type(part).__name__)
                self._parts.remove(part)

    def state(self, text: str) -> None:
        """What the run as a whole does, for a person."""
        if self._console is not None and self._console in self._parts:
            self._console.state(text)

    async def close(self, status: Status, summary: Mapping[str, Any], seconds: float | None = None) -> None:
        """End the MLflow run, with config.yaml and summary.json as artifacts. Bounded: see `MlflowTracker.finish`; seconds: all
        the time that there is."""
        if self._console is not None:
            await self._console.close()
        if self._mlflow is not None:
            await asyncio.to_thread(self._mlflow.finish, MLFLOW_STATUS[status], [self._run_dir / "summary.json"], seconds)

    @property
    def mlflow_run_id(self) -> str | None:
        return self._mlflow.run_id if self._mlflow is not None else None


def make_hub(config: Config, run_dir: Path, *, show_progress: bool, mlflow_run_id: str | None = None) -> Hub:
    """MLflow as `tracking.mlflow` says, and progress on standard output. mlflow_run_id: of a run that goes on."""
    console = (
        ConsoleProgress(sys.stdout, steps=config.training.steps, bound=config.rollout.staleness_limit) if show_progress else None
    )
    mlflow = None
    if config.tracking.mlflow is not None:
        uri, experiment = absolute_uri(config.tracking.mlflow.uri), config.tracking.mlflow.experiment
        start_ms = int(time.time() * 1000)
        folder = Path.cwd()

        def facts() -> RunFacts:
            run_tags = {**tags(folder), "run_dir": str(run_dir.absolute())}
            return RunFacts(uri, experiment, config.name, flattened(config.to_mapping()), run_tags, start_ms)

        seconds = FINISH_SECONDS if uri.startswith(("http://", "https://")) else LOCAL_FINISH_SECONDS
        mlflow = MlflowTracker(
            facts, run_dir, artifacts_at_start=[run_dir / "config.yaml"], finish_seconds=seconds, run_id=mlflow_run_id
        )
    return Hub(run_dir, mlflow=mlflow, console=console)
