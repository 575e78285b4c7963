"""The launcher's side of the wiring: a supervisor on the Ray runtime, with the run's metrics."""

from __future__ import annotations

from pathlib import Path

from asyncrl.clock import SystemClock
from asyncrl.cluster.ray_runtime import RayRuntime
from asyncrl.cluster.spec import RunSpec
from asyncrl.services.supervisor import Resume, Supervisor
from asyncrl.tracking.hub import make_hub
from asyncrl.transport import security
from asyncrl.transport.hosts import is_loopback
from asyncrl.transport.keys import make_keys, remove_keys


def make_supervisor(
    spec: RunSpec, *, show_progress: bool, resume: Resume | None = None, mlflow_run_id: str | None = None
) -> Supervisor:
    """resume: where an earlier launch of this run goes on; mlflow_run_id: the MLflow run that goes on with it. `open_door` comes
    first."""
    config, run_dir = spec.parsed_config(), Path(spec.run_dir)
    metrics = make_hub(config, run_dir, show_progress=show_progress, mlflow_run_id=mlflow_run_id)
    runtime = RayRuntime(spec)
    return Supervisor(
        config, run_dir, spec.run_id, runtime, metrics, SystemClock(), resume=resume, at_end=lambda: _close_door(run_dir)
    )


def open_door(spec: RunSpec) -> None:
    """This launch's keys, before anything listens; they go when the supervisor ends. Raises UserError where there can be none."""
    run_dir, bind_address = Path(spec.run_dir), spec.parsed_config().cluster.bind_address
    if is_loopback(bind_address):
        remove_keys(run_dir)  # an earlier launch's, which was killed
    else:
        make_keys(run_dir)
    security.enter(security.open_door(run_dir, bind_address))


def _close_door(run_dir: Path) -> None:
    remove_keys(run_dir)
    security.leave()
