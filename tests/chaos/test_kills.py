"""Processes killed with -9 while a run goes on: it goes on, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.witness import faults
from tests.end_to_end.runs import Launched, kill_tree, leftovers

pytestmark = [pytest.mark.end_to_end]

BACK_SECONDS = 30.0
SETS = (
    "eval.every=0",
    "eval.samples=64",
    "training.groups_per_step=4",
    "rollout.max_concurrent=64",
    "checkpoint.every=10",
    "reward.workers=2",
)
KINDS = ("message_queue", "rollouter", "reward", "reward/1", "inference/0", "parameter_sync", "trainer/0")


def steps_made(run_dir: Path) -> set[str]:
    """The whole lines of metrics.jsonl, which may be cut just now. A step made again has another line: its times differ."""
    file = run_dir / "metrics.jsonl"
    return {line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")} if file.exists() else set()


class Chaos:
    """Kills rows of one run, one after the other, and sees each come back."""

    def __init__(self, run: Launched, seed: int):
        self.run, self.random = run, random.Random(seed)
        self.slowest = 0.0

    def kill(self, row: str) -> None:
        """Kill this row, wait until it is back and a further step is made, then a random moment longer."""
        self._until(lambda: psutil.pid_exists(self._pid(row)), BACK_SECONDS, f"{row} is back from an earlier kill")
        pid, before = self._pid(row), self._steps()
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        self._until(lambda: self._pid(row) != pid, BACK_SECONDS, f"{row} is back")
        self.slowest = max(self.slowest, time.monotonic() - began)
        self._until(lambda: not self._steps() <= before, 90, f"a step after {row} was killed")
        time.sleep(self.random.uniform(0, 2))

    def _pid(self, row: str) -> int:
        return int(self.run.started["processes"][row][0])

    def _steps(self) -> set[str]:
        return steps_made(self.run.run_dir)

    def _until(self, condition, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.run.process.poll() is None, f"the run ended before {what}:\n{self.run.text[-4000:]}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.run.text[-2000:]}"
            time.sleep(0.05)


def rounds_of_kills(tmp_path: Path, durability: str, rounds: int, steps: int, *, seed: int) -> None:
    run = Launched(tmp_path / "run", *SETS, f"training.steps={steps}", f"queue.durability={durability}", short=False)
    try:
        run.until_step(2)
        chaos = Chaos(run, seed)
        for _ in range(rounds):
            kinds = list(KINDS)
            chaos.random.shuffle(kinds)
            for row in kinds:
                chaos.kill(row)
        assert run.wait(600) == 0, run.text[-4000:]
    finally:
        if run.process.poll() is None:
            kill_tree(run.process.pid)
    assert run.summary["status"] == "finished"
    assert run.summary["steps"] == steps
    assert run.summary["restarts"] > 0
    assert run.summary["sync"]["verified"] is True, "no digest differed, and who left one unanswered has confirmed since"
    assert faults(run.run_dir) == []
    audit = run.command("audit")
    assert audit.returncode == 0, audit.stdout
    assert leftovers(run.run_dir) == []
    print(f"{durability}: {rounds * len(KINDS)} kills, slowest back after {chaos.slowest:.1f} s")


@pytest.mark.timeout(400)
def test_every_kind_of_process_killed_once(tmp_path: Path) -> None:
    rounds_of_kills(tmp_path, "process", rounds=1, steps=400, seed=0)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durability", ["process", "none"])
def test_every_kind_of_process_killed_ten_times(tmp_path: Path, durability: str) -> None:
    rounds_of_kills(tmp_path, durability, rounds=10, steps=4000, seed=1)
