"""summary.json from what the services report. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

from asyncrl.config.schema import Config
from asyncrl.services.supervisor.runtime import Resume

Status = Literal["finished", "failed", "interrupted"]
STALENESS = ("max", "mean", "steps_max", "steps_mean", "bound_mean", "bound_last")


def empty_summary(config: Config) -> dict[str, Any]:
    """Every key that a summary has, with the values of a run that did nothing."""
    ends = ("dispatched", "trained", "filtered", "failed", "expired", "queued", "in_flight")
    return {
        "status": "failed",
        "error": None,
        "steps": 0,
        "policy_version": 0,
        "wall_s": 0.0,
        "first_step_s": None,
        "reward": {"first": None, "last": None},
        "eval": {"first": None, "last": None},
        "staleness": {"bound": config.rollout.staleness_limit, **dict.fromkeys(STALENESS)},
        "samples": {**dict.fromkeys(ends, 0), "reasons": {}},
        "trajectories": {"generated": 0, "trained": 0, "failed": 0},
        "tokens": {"generated": 0, "trained": 0},
        "sync": {
            "count": 0,
            "pause_ms": {"p50": None, "p99": None, "max": None},
            "transfer_ms": {"p50": None, "p99": None},
            "bytes": 0,
            "skipped": 0,
            "verified": False,
            "unanswered": 0,
        },
        "idle": {"trainer": None, "rollouter": None, "reward": None},
        "queue": {"capacity": config.queue.capacity, "max_depth": 0, "blocked_s": 0.0, "topics": {}},
        "restarts": 0,
        "mlflow_run_id": None,
        "exit_code": 1,
    }


def build_summary(
    config: Config,
    parts: Mapping[str, Mapping[str, Any]],
    *,
    status: Status,
    error: str | None,
    started_wall: float,
    ended_wall: float,
    mlflow_run_id: str | None,
    exit_code: int,
    first_step_wall: float | None = None,
    resume: Resume | None = None,
    restarts: int = 0,
) -> dict[str, Any]:
    """Lay the services' parts over an empty summary, key by key; a service that died leaves the empty values of its keys.

    parts: row name to that service's `summary()`; exit_code: of the command that ran it. Wall times are this launch's, and
    `first_step_s` is of its first step, whichever trainer process made it: the earliest of `first_step_wall`, when the supervisor
    heard of a step first, and `first_step_time`, which the present trainer says. resume: what a resumed launch goes on from,
    which adds `launches` and `total_wall_s`: of all of them, but for what the one before took after that checkpoint. restarts:
    how often processes were started again in this launch.
    """
    summary = empty_summary(config)
    first_steps = [first_step_wall]
    for name in sorted(parts):
        part = copy.deepcopy(dict(parts[name]))
        first_steps.append(part.pop("first_step_time", None))
        _lay_over(summary, part)
    if known := [wall for wall in first_steps if wall is not None]:
        summary["first_step_s"] = round(min(known) - started_wall, 2)
    wall_s = round(ended_wall - started_wall, 2)
    summary.update(status=status, error=error, wall_s=wall_s, mlflow_run_id=mlflow_run_id, exit_code=exit_code, restarts=restarts)
    if resume is not None:
        summary.update(launches=resume.launches, total_wall_s=round(resume.wall_s + wall_s, 2))
    return summary


def _lay_over(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(below.get(key), dict):
            assert isinstance(value, Mapping), f"{key} has parts, and a service reports {value!r} for the whole of it"
            _lay_over(below[key], value)
        else:
            below[key] = value
