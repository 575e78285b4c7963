"""failed_samples.jsonl: the trajectories of groups that failed before the trainer saw them, as text.

The fields are those of samples.jsonl, which the trainer writes; `step` is null. All are kept up to a bound, so that a reward
that always fails can be understood, and cannot fill the disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.messages import Trajectory
from asyncrl.scheduling.groups import FailedGroup

FILE_NAME = "failed_samples.jsonl"
MOST_BYTES = 256 * 10**6


class FailedSamples:
    """Called with each failed group; appends and flushes a line a trajectory."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / FILE_NAME
        self._bytes = self._path.stat().st_size if self._path.exists() else 0

    def __call__(self, group: FailedGroup) -> None:
        samples = zip(group.trajectories, group.failures, strict=True)
        lines = "".join(json.dumps(_sample(trajectory, failure or group.reason)) + "\n" for trajectory, failure in samples)
        if self._bytes + len(lines) > MOST_BYTES:
            return
        self._bytes += len(lines)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)


def _sample(trajectory: Trajectory, reason: str) -> dict[str, Any]:
    versions = trajectory.versions
    return {
        "step": None,
        "id": str(trajectory.id),
        "state": "failed",
        "reason": reason,
        "reward": None,
        "prompt": trajectory.prompt,
        "response": trajectory.response,
        "finish_reason": trajectory.finish_reason,
        "ground_truth": trajectory.ground_truth,
        "versions": {"min": int(versions.min()), "max": int(versions.max())} if len(versions) else None,
    }
