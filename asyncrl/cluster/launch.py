"""The launcher's side of the wiring: a supervisor on the Ray runtime, with the run's metrics."""

from __future__ import annotations

from pathlib import Path

from asyncrl.clock import SystemClock
from asyncrl.cluster.ray_runtime import RayRuntime
from asyncrl.cluster.spec import RunSpec
from asyncrl.services.supervisor import Resume, Supervisor
from asyncrl.tracking.hub import make_hub


def make_supervisor(
    spec: RunSpec, *, show_progress: bool, resume: Resume | None = None, mlflow_run_id: str | None = None
) -> Supervisor:
    """resume: where an earlier launch of this run goes on; mlflow_run_id: the MLflow run that goes on with it."""
    config, run_dir = spec.parsed_config(), Path(spec.run_dir)
    metrics = make_hub(config, run_dir, show_progress=show_progress, mlflow_run_id=mlflow_run_id)
    return Supervisor(config, run_dir, spec.run_id, RayRuntime(spec), metrics, SystemClock(), resume=resume)
