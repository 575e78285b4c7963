"""What the pipeline itself costs: CPU time of all processes, less forward, backward, optimizer and decode, per trajectory.

The quickstart runs as a user runs it. Between two steps, CPU seconds (user and system) of every process of the run are read,
Ray's and the launcher's included. What the trainer spent in forward, backward and optimizer is taken off, and what the server
spent in the model, in moving its keys and values from slot to slot, and in sampling (both read their own thread's processor
time). The rest is what moving, scoring and recording cost.
The limit is 0.5 ms a trajectory. There is no baseline to compare with: `baseline` is the limit, `ratio` what is used of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import asyncrl

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"
LIMIT_MS = 0.5
DEADLINE_SECONDS = 600.0


@dataclass(frozen=True)
class Reading:
    """At one moment: steps finished, trajectories that they took, CPU seconds by process, and those spent computing."""

    step: int
    trajectories: int
    cpu_by_process: dict[str, float]
    compute: float

    @property
    def cpu(self) -> float:
        return sum(self.cpu_by_process.values())


class Run:
    """The quickstart, launched from this process."""

    def __init__(self, folder: Path, steps: int):
        overrides = [f"training.steps={steps}", "eval.every=0", f"tracking.mlflow.uri=sqlite:///{folder}/mlflow.db"]
        pipeline = asyncrl.Pipeline.from_yaml(QUICKSTART, overrides)
        self._per_step = pipeline.config.training.groups_per_step * pipeline.config.rollout.group_size
        self._run = pipeline.launch(folder / "run", progress=False)
        self._names: dict[int, str] = {}

    def reading_at(self, step: int) -> Reading:
        """Wait for `step`, then read."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        path = self._run.run_dir / "metrics.jsonl"
        while not path.exists() or path.read_bytes().count(b"\n") < step:
            assert not self._run.done, self._run.wait()
            assert time.monotonic() < deadline, f"step {step} did not come within {DEADLINE_SECONDS:.0f} s"
            time.sleep(0.25)
        status = self._run.status()
        self._names = {row["pid"]: row["name"] for row in status["services"]}
        decode = sum(row["forward_cpu_seconds"] for row in status["services"] if row["name"].startswith("inference/"))
        rows = self._rows()
        compute = sum(row["time/compute_cpu_s"] for row in rows) + decode
        return Reading(len(rows), len(rows) * self._per_step, self._cpu_by_process(), compute)

    def _rows(self) -> list[dict[str, Any]]:
        path = self._run.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def _cpu_by_process(self) -> dict[str, float]:
        used: dict[str, float] = {}
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                times, name = process.cpu_times(), self._names.get(process.pid, process.name())
            except psutil.NoSuchProcess:
                continue
            name = "launcher" if process.pid == os.getpid() else name
            used[name] = used.get(name, 0.0) + times.user + times.system
        return used

    def finish(self) -> None:
        summary = self._run.wait()
        assert summary["status"] == "finished", summary["error"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=60, help="the step after which counting begins")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(Path(scratch), options.steps + 10)
        before, after = run.reading_at(options.first), run.reading_at(options.steps)
        run.finish()
    trajectories = after.trajectories - before.trajectories
    overhead = (after.cpu - before.cpu) - (after.compute - before.compute)
    ms = 1e3 * overhead / trajectories
    spent = {
        name: 1e3 * (seconds - before.cpu_by_process.get(name, 0.0)) / trajectories
        for name, seconds in after.cpu_by_process.items()
    }
    report = {
        "name": "overhead",
        "ratio": round(ms / LIMIT_MS, 3),
        "ours": round(ms, 4),
        "baseline": LIMIT_MS,
        "limit": LIMIT_MS,
        "ok": ms <= LIMIT_MS,
        "unit": "ms of CPU a trajectory",
        "trajectories": trajectories,
        "compute_ms": round(1e3 * (after.compute - before.compute) / trajectories, 4),
        "all_ms_by_process": {
            name: round(value, 4) for name, value in sorted(spent.items(), key=lambda item: -item[1]) if value > 1e-3
        },
    }
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
