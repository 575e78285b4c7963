"""What a long run keeps: the quickstart at full speed for half an hour, with a durable queue and checkpoints.

Every few seconds the memory (PSS) and the open descriptors of each process of the run are read, and the bytes of the run's
shared memory, journal and checkpoints. The first tenth is warm-up. From then on, each process's memory may grow by 5 % or 10 MB,
whichever is more, and by less than 1 MB in 10 minutes by its slope (Theil-Sen, which a single spike does not move); descriptors,
shared memory, journal and checkpoints may not grow beyond a small share of what they were. What a run keeps on purpose (ledger,
metrics, batches, samples, logs, MLflow) grows with the steps, and is told per step, without a limit.

`ratio`, `ours`: the largest growth of a process's memory as a share of what it may be; `baseline`: 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import asyncrl

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"
PERIOD_SECONDS = 5.0
WARM_UP_SHARE = 0.1
GROWTH_SHARE, GROWTH_BYTES = 0.05, 10e6
SLOPE_BYTES_PER_SECOND = 1e6 / 600
DESCRIPTORS = 8
BOUNDED_SHARE, BOUNDED_BYTES = 0.25, 8e6
KEPT = ("ledger.sqlite", "ledger.sqlite-wal", "metrics.jsonl", "batches.jsonl", "samples.jsonl", "logs")


@dataclass
class Series:
    """Values over time."""

    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.seconds.append(at)
        self.values.append(value)

    def after(self, start: float) -> Series:
        pairs = [(at, value) for at, value in zip(self.seconds, self.values, strict=True) if at >= start]
        return Series([at for at, _ in pairs], [value for _, value in pairs])

    @property
    def ends(self) -> tuple[float, float]:
        """Medians of the first and of the last tenth."""
        share = max(1, len(self.values) // 10)
        return statistics.median(self.values[:share]), statistics.median(self.values[-share:])

    @property
    def slope(self) -> float:
        """Theil-Sen over points that stand at least a quarter of the series apart, per second."""
        count = len(self.values)
        slopes = [
            (self.values[j] - self.values[i]) / (self.seconds[j] - self.seconds[i])
            for i in range(count)
            for j in range(i + max(1, count // 4), count)
        ]
        return statistics.median(slopes) if slopes else 0.0


class Readings:
    """What is read of a run, by name."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self.memory: dict[str, Series] = defaultdict(Series)
        self.descriptors: dict[str, Series] = defaultdict(Series)
        self.bounded: dict[str, Series] = defaultdict(Series)

    def read(self, at: float) -> None:
        started = json.loads((self._run_dir / "run.json").read_text())
        processes = {name: pid for name, (pid, _) in started["processes"].items()}
        for name, pid in {**processes, "launcher": os.getpid()}.items():
            process = psutil.Process(pid)
            self.memory[name].add(at, process.memory_full_info().pss)
            self.descriptors[name].add(at, process.num_fds())
        self.bounded["shared memory"].add(at, _bytes(Path("/dev/shm").glob(f"asyncrl-{started['run_id']}-*")))
        self.bounded["journal"].add(at, _bytes((self._run_dir / "journal").rglob("*")))
        self.bounded["checkpoints"].add(at, _bytes((self._run_dir / "checkpoints").rglob("*")))


def _bytes(paths: Any) -> float:
    total = 0.0
    for path in paths:
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def checks_of(readings: Readings, start: float) -> dict[str, Any]:
    """Every limit, with what was measured."""
    checks: dict[str, Any] = {}
    for name, series in readings.memory.items():
        first, last = series.after(start).ends
        allowed = max(GROWTH_SHARE * first, GROWTH_BYTES)
        slope = series.after(start).slope
        checks[f"memory of {name}"] = {
            "first_mb": round(first / 1e6, 1),
            "grown_mb": round((last - first) / 1e6, 2),
            "allowed_mb": round(allowed / 1e6, 1),
            "mb_per_10_minutes": round(slope * 600 / 1e6, 3),
            "ok": last - first <= allowed and slope < SLOPE_BYTES_PER_SECOND,
        }
    for name, series in readings.descriptors.items():
        first, last = series.after(start).ends
        checks[f"descriptors of {name}"] = {"first": first, "last": last, "ok": last - first <= DESCRIPTORS}
    for name, series in readings.bounded.items():
        first, last = series.after(start).ends
        allowed = max(BOUNDED_SHARE * first, BOUNDED_BYTES)
        checks[f"bytes of {name}"] = {
            "first_mb": round(first / 1e6, 2),
            "last_mb": round(last / 1e6, 2),
            "most_mb": round(max(series.values) / 1e6, 2),
            "ok": last - first <= allowed,
        }
    return checks


def soak(minutes: float, folder: Path) -> dict[str, Any]:
    overrides = [
        "training.steps=1000000",
        "training.schedule=constant",
        "training.final_learning_rate_factor=0",
        "training.learning_rate=1.0e-5",
        "eval.every=500",
        "checkpoint.every=100",
        "queue.durability=process",
        f"tracking.mlflow.uri=sqlite:///{folder}/mlflow.db",
    ]
    run = asyncrl.Pipeline.from_yaml(QUICKSTART, overrides).launch(folder / "run", progress=False)
    while run.status().get("step", 0) < 1:
        assert not run.done, run.wait()
        time.sleep(0.5)
    readings, began = Readings(run.run_dir), time.monotonic()
    while (at := time.monotonic() - began) < 60 * minutes:
        assert not run.done, run.wait()
        readings.read(at)
        time.sleep(PERIOD_SECONDS)
    run.stop()
    summary = run.wait()
    checks = checks_of(readings, WARM_UP_SHARE * 60 * minutes)
    grown = [each["grown_mb"] / each["allowed_mb"] for name, each in checks.items() if name.startswith("memory")]
    kept = {name: _bytes([path, *path.rglob("*")]) for name in KEPT if (path := run.run_dir / name).exists()}
    return {
        "name": "soak",
        "ratio": round(max(grown), 3),
        "ours": round(max(grown), 3),
        "baseline": 1.0,
        "limit": 1.0,
        "minutes": minutes,
        "steps": summary["steps"],
        "status": summary["status"],
        "kept_bytes_per_step": {name: round(size / max(1, summary["steps"]), 1) for name, size in kept.items()},
        "checks": checks,
        "ok": all(each["ok"] for each in checks.values()) and summary["status"] == "interrupted",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    with tempfile.TemporaryDirectory(prefix="asyncrl-soak-") as folder:
        result = soak(parser.parse_args().minutes, Path(folder))
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
