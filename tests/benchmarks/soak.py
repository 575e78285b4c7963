"""What a long run keeps: the quickstart at full speed for half an hour, with a durable queue and checkpoints, as one run.

Every few seconds these are read, and judged by how they have grown since the warm-up:

    memory of each process of the run, and of the launcher     ≤ 5 % or 10 MB, whichever is more; less than 1 MB in 10 minutes
    its open descriptors                                       ≤ 4
    files of the run that nothing keeps: by bytes and number   ≤ a quarter or 2 MB; ≤ 8 files
    the same: shared memory, temporary files, Ray's folder

Memory is what can leak: anonymous and shared pages, each by its share (PSS). Pages of mapped files are libraries, whose share
depends on who else on the machine uses them; they are told under `pss_mb`. Children of a process count with it. The rate by time
is a Theil-Sen slope, which neither spikes nor a sawtooth move; below 10 minutes it says nothing yet, and is not judged. Files
come and go, so of these the crests are compared.

What a run keeps on purpose (ledger, metrics, batches, samples, figures of syncs and evaluations, logs, MLflow) grows with the
steps, and is told per step, without a limit. Every other file must not grow, whatever its name.

`ratio`, `ours`: the largest growth of a process's memory, as a share of what it may be; `baseline`: 1.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and __spec__ is None:  # run as a file, not with -m
    sys.path.pop(0)  # this folder holds names of standard modules: it must leave the path before all imports

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from asyncrl.cluster.sweep import folders_of
from tests.end_to_end.runs import Launched

PERIOD_SECONDS = 5.0
TELL_SECONDS = 60.0
WARM_UP_SECONDS, WARM_UP_SHARE = 180.0, 0.5  # the shorter of the two
TEN_MINUTES = 600.0
KEPT = (
    "ledger.sqlite",
    "metrics.jsonl",
    "batches.jsonl",
    "samples.jsonl",
    "failed_samples.jsonl",
    "eval.jsonl",
    "sync.jsonl",
    "logs",
)
"""Files and folders of a run directory that grow with the run on purpose."""


@dataclass(frozen=True)
class Limit:
    """Growth since the warm-up: the larger of `share` and `least`, of the medians or of the crests; and less than
    `per_ten_minutes`."""

    share: float
    least: float
    of: Literal["medians", "crests"] = "medians"
    per_ten_minutes: float = math.inf


MEMORY = Limit(share=0.05, least=10e6, per_ten_minutes=1e6)
DESCRIPTORS = Limit(share=0.0, least=4)
BYTES = Limit(share=0.25, least=2e6, of="crests")
NUMBER = Limit(share=0.0, least=8, of="crests")


@dataclass
class Series:
    """Values over time, in order."""

    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.seconds.append(at)
        self.values.append(value)

    def after(self, start: float) -> Series:
        pairs = [(at, value) for at, value in zip(self.seconds, self.values, strict=True) if at >= start]
        return Series([at for at, _ in pairs], [value for _, value in pairs])

    @property
    def span_seconds(self) -> float:
        return self.seconds[-1] - self.seconds[0] if self.seconds else 0.0

    @property
    def medians(self) -> tuple[float, float]:
        """Of the first and of the last tenth."""
        part = max(1, len(self.values) // 10)
        return statistics.median(self.values[:part]), statistics.median(self.values[-part:])

    @property
    def crests(self) -> tuple[float, float]:
        """Of the first and of the last third."""
        part = max(1, len(self.values) // 3)
        return max(self.values[:part]), max(self.values[-part:])

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


def judged(series: Series, limit: Limit, unit: float = 1.0) -> dict[str, Any]:
    """The series, from which the warm-up is taken off already, against the limit; figures in `unit`."""
    first, last = getattr(series, limit.of)
    allowed, rate = max(limit.share * first, limit.least), series.slope * TEN_MINUTES
    rate_counts = series.span_seconds >= TEN_MINUTES
    verdict = {
        "first": round(first / unit, 2),
        "grown": round((last - first) / unit, 2),
        "allowed": round(allowed / unit, 2),
        "most": round(max(series.values) / unit, 2),
    }
    if limit.per_ten_minutes < math.inf:
        verdict |= {"per_10_minutes": round(rate / unit, 3), "rate_judged": rate_counts}
    return {**verdict, "ok": last - first <= allowed and (not rate_counts or rate < limit.per_ten_minutes)}


class Readings:
    """What is read of a run, by name."""

    def __init__(self, run_dir: Path, scratch: Path, launcher: int):
        """scratch: the folder of temporary files, MLflow's file and run directory; launcher: the launcher's process id."""
        self._run_dir, self._scratch, self._launcher = run_dir, scratch, psutil.Process(launcher)
        self.memory: dict[str, Series] = defaultdict(Series)
        self.pss: dict[str, Series] = defaultdict(Series)
        self.descriptors: dict[str, Series] = defaultdict(Series)
        self.bytes: dict[str, Series] = defaultdict(Series)
        self.number: dict[str, Series] = defaultdict(Series)
        self.kept: dict[str, Series] = defaultdict(Series)
        self.steps = Series()
        self.ids: set[tuple[str, int]] = set()
        """(name, process id) of all processes ever seen: one that was started again begins with fresh memory."""

    def read(self, at: float) -> None:
        started = json.loads((self._run_dir / "run.json").read_text())
        self.steps.add(at, _last_step(self._run_dir / "metrics.jsonl"))
        self._read_processes(at, {name: pid for name, (pid, _) in started["processes"].items()})
        self._read_files(at, started["run_id"])

    def line(self) -> str:
        """The last reading, for a person."""
        memory = ", ".join(f"{name} {series.values[-1] / 1e6:.1f}" for name, series in self.memory.items())
        return f"{self.steps.seconds[-1] / 60:.1f} minutes, step {self.steps.values[-1]:.0f}, MB: {memory}"

    def _read_processes(self, at: float, rows: dict[str, int]) -> None:
        self.ids |= set(rows.items())
        families = {name: family_of(pid) for name, pid in rows.items()}
        families["launcher"] = [self._launcher]
        ours = {process for family in families.values() for process in family}
        families["ray"] = [process for process in self._launcher.children(recursive=True) if process not in ours]
        for name, family in families.items():
            memory, pss, descriptors = taken_by(family)
            self.memory[name].add(at, memory)
            self.pss[name].add(at, pss)
            self.descriptors[name].add(at, descriptors)

    def _read_files(self, at: float, run_id: str) -> None:
        """By the first part of their path, so that a folder counts as one."""
        groups = {
            **{path.name: [path] for path in self._run_dir.iterdir()},
            "mlflow.db": [self._scratch / "mlflow.db"],
            "mlruns": [self._scratch / "mlruns"],
            "temporary files": [self._scratch / "tmp"],
            "shared memory": Path("/dev/shm").glob(f"asyncrl-{run_id}-*"),
            "Ray's folder": [folders_of(run_id).ray],
            **{path.name: [path] for path in self._scratch.glob("mlflow.db-*")},
        }
        for name in groups.keys() | self.bytes.keys():
            number, size = _number_and_bytes(groups.get(name, ()))
            if name in (*KEPT, "mlflow.db", "mlruns"):
                self.kept[name].add(at, size)
            else:
                self._with_zeros(self.bytes, name).add(at, size)
                self._with_zeros(self.number, name).add(at, number)

    def _with_zeros(self, by_name: dict[str, Series], name: str) -> Series:
        """A file that was not there before took no room until now."""
        if name not in by_name:
            by_name[name] = Series(self.steps.seconds[:-1], [0.0] * (len(self.steps.seconds) - 1))
        return by_name[name]


def family_of(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def taken_by(processes: Iterable[psutil.Process]) -> tuple[float, float, float]:
    """Bytes of anonymous and shared memory, of memory with mapped files (both PSS), and open descriptors."""
    memory = pss = descriptors = 0.0
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):  # a child that ends meanwhile
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            kilobytes = {name: float(size) for name, size, *_ in map(str.split, text.splitlines()[1:])}
            descriptors += process.num_fds()
            memory += 1024 * (kilobytes["Pss_Anon:"] + kilobytes["Pss_Shmem:"] + kilobytes["SwapPss:"])
            pss += 1024 * (kilobytes["Pss:"] + kilobytes["SwapPss:"])
    return memory, pss, descriptors


def _last_step(metrics: Path) -> int:
    lines = metrics.read_bytes()[-65_536:].split(b"\n")
    return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else 0


def _number_and_bytes(paths: Iterable[Path]) -> tuple[int, float]:
    number, size = 0, 0.0
    for path in paths:
        for each in (path, *path.rglob("*")) if path.is_dir() else (path,):
            with suppress(FileNotFoundError):
                if not each.is_dir():
                    number, size = number + 1, size + each.stat().st_size
    return number, size


def checks_of(readings: Readings, start: float) -> dict[str, Any]:
    """Every limit, with what was measured from `start` on."""
    checks: dict[str, Any] = {}
    for name, series in readings.memory.items():
        pss = [round(value / 1e6, 1) for value in readings.pss[name].after(start).medians]
        checks[f"memory of {name} (MB)"] = {**judged(series.after(start), MEMORY, 1e6), "pss_mb": pss}
    for name, series in readings.descriptors.items():
        checks[f"descriptors of {name}"] = judged(series.after(start), DESCRIPTORS)
    for name, series in readings.bytes.items():
        checks[f"bytes of {name} (MB)"] = judged(series.after(start), BYTES, 1e6)
    for name, series in readings.number.items():
        checks[f"files of {name}"] = judged(series.after(start), NUMBER)
    names = [name for name, _ in readings.ids]
    checks["processes are those of the start"] = {"ok": len(names) == len(set(names))}
    return checks


def failed_of(checks: Mapping[str, Any]) -> list[str]:
    return [name for name, each in checks.items() if not each["ok"]]


def kept_per_step(readings: Readings, start: float) -> dict[str, float]:
    """Bytes that each kept file or folder grew by in a step, from `start` on."""
    steps = readings.steps.after(start).values
    return {
        name: round((series.after(start).values[-1] - series.after(start).values[0]) / max(1.0, steps[-1] - steps[0]), 1)
        for name, series in readings.kept.items()
    }


def steps_per_second(series: Series) -> list[float]:
    """In the first and in the second half."""
    middle = len(series.values) // 2
    halves = (0, middle), (middle, -1)
    return [round((series.values[b] - series.values[a]) / max(1e-9, series.seconds[b] - series.seconds[a]), 2) for a, b in halves]


def soak(minutes: float, folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    (folder / "tmp").mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    overrides = [
        "training.steps=1000000",
        "training.schedule=constant",
        "training.final_learning_rate_factor=0",
        "training.learning_rate=1.0e-5",  # the model goes on making mistakes, so that there are groups to train on
        "checkpoint.every=100",
        "queue.durability=process",
        *overrides,
    ]
    run = Launched(folder / "run", *overrides, short=False)  # a process of its own: this one's readings are not its memory
    run.until_step(1, 120)
    readings, start = Readings(run.run_dir, folder, run.process.pid), min(WARM_UP_SECONDS, WARM_UP_SHARE * 60 * minutes)
    at, told, looked = 0.0, 0.0, time.monotonic()
    while at < 60 * minutes:
        assert run.process.poll() is None, run.text
        readings.read(at)
        if at >= told + TELL_SECONDS:
            told = at
            print(readings.line(), "; beyond their limits:", failed_of(checks_of(readings, min(start, at / 2))), flush=True)
        time.sleep(PERIOD_SECONDS)
        now = time.monotonic()
        at, looked = at + min(now - looked, 2 * PERIOD_SECONDS), now  # time during which all were suspended is none
    run.command("stop")
    run.wait(120)
    summary = run.summary
    checks = checks_of(readings, start)
    checks["the run ended as it was told to"] = {"status": summary["status"], "ok": summary["status"] == "interrupted"}
    worst = max(each["grown"] / each["allowed"] for name, each in checks.items() if name.startswith("memory"))
    return {
        "name": "soak",
        "ratio": round(worst, 3),
        "ours": round(worst, 3),
        "baseline": 1.0,
        "limit": 1.0,
        "ok": all(each["ok"] for each in checks.values()),
        "minutes": minutes,
        "warm_up_seconds": start,
        "steps": summary["steps"],
        "steps_per_second": steps_per_second(readings.steps.after(start)),
        "kept_bytes_per_step": kept_per_step(readings, start),
        "failed": failed_of(checks),
        "checks": checks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the pipeline, as for asyncrl launch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-soak-") as folder:
        result = soak(options.minutes, Path(folder), options.set)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
