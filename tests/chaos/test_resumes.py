"""The whole run killed with -9 and launched again: it goes on where its checkpoint and its ledger stand."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.checkpoint import Checkpoints
from tests.chaos.test_kills import SETS, steps_made
from tests.chaos.witness import faults
from tests.end_to_end.runs import Launched, asyncrl, leftovers

pytestmark = [pytest.mark.end_to_end]

BACK_SECONDS = 15.0  # beyond what the first start took


def kill_everything(run: Launched) -> None:
    """The launcher and all below it, at once, as a machine that reboots."""
    launcher = psutil.Process(run.process.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    run.process.wait(10)


class Launches:
    """Launches of one run, one after the other, each timed from its start to its first step."""

    def __init__(self, run_dir: Path, *sets: str):
        self._run_dir, self._sets = run_dir, sets
        self._start_up: float | None = None

    def next(self) -> Launched:
        """A launch that has made a step: in time, compared with the first."""
        before = steps_made(self._run_dir)
        began = time.monotonic()
        run = Launched(self._run_dir, *self._sets, short=False)
        run.until(lambda: not steps_made(self._run_dir) <= before, 150, "a further step")
        seconds = time.monotonic() - began
        self._start_up = self._start_up or seconds
        assert seconds <= self._start_up + BACK_SECONDS, f"back after {seconds:.1f} s, first up after {self._start_up:.1f} s"
        return run


def killed_and_resumed(tmp_path: Path, durability: str, kills: int, steps: int, *, seed: int, sets: tuple[str, ...] = ()) -> None:
    chance = random.Random(seed)
    launches = Launches(tmp_path / "run", *SETS, f"training.steps={steps}", f"queue.durability={durability}", *sets)
    mlflow_runs = set()
    for left in reversed(range(kills)):
        run = launches.next()
        share = steps // (kills + 1)  # of the steps: the last launch, too, has some to make
        run.until_step(len(steps_made(run.run_dir)) + chance.randrange(share))
        if not left:
            run.until(lambda: Checkpoints(tmp_path / "run").newest_complete() is not None, 90, "a checkpoint")
        time.sleep(chance.uniform(0, 0.2))
        mlflow_runs.add(run.started["mlflow_run_id"])
        kill_everything(run)
    run = launches.next()
    assert run.wait(600) == 0, run.text[-4000:]
    assert "the run goes on from the checkpoint of step" in run.text
    assert run.summary["status"] == "finished"
    assert run.summary["steps"] == steps
    assert run.summary["launches"] == kills + 1
    assert mlflow_runs - {None} <= {run.summary["mlflow_run_id"]}, "one MLflow run goes on"
    assert faults(run.run_dir) == []
    audit = run.command("audit")
    assert audit.returncode == 0, audit.stdout
    assert leftovers(run.run_dir) == []


@pytest.mark.timeout(300)
def test_a_run_killed_once_goes_on(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, "process", kills=1, steps=120, seed=0)


@pytest.mark.timeout(300)
def test_a_run_with_greedy_responses_killed_once_goes_on(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, "process", kills=1, steps=120, seed=2, sets=("algorithm.advantage=remax",))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durability", ["process", "none"])
def test_a_run_killed_ten_times_goes_on(tmp_path: Path, durability: str) -> None:
    killed_and_resumed(tmp_path, durability, kills=10, steps=900, seed=1)


ON_POLICY = (
    *SETS, "rollout.max_staleness=0", "training.steps=60", "checkpoint.every=10", "eval.every=0",
)  # fmt: skip


def last_parameters(run_dir: Path) -> bytes:
    """Every parameter of the last checkpoint, exported."""
    to = run_dir.with_name(f"{run_dir.name}-exported")
    exported = asyncrl("export", str(run_dir), "--to", str(to))
    assert exported.returncode == 0, exported.stderr
    return (to / "model.safetensors").read_bytes()


@pytest.mark.timeout(400)
@pytest.mark.long
@pytest.mark.parametrize("durability", ["process", "none"])
def test_on_policy_a_killed_run_ends_with_the_very_parameters_of_an_undisturbed_one(tmp_path: Path, durability: str) -> None:
    sets = (*ON_POLICY, f"queue.durability={durability}")
    calm = Launched(tmp_path / "calm", *sets, short=False)
    assert calm.wait(200) == 0, calm.text[-4000:]
    run = Launched(tmp_path / "killed", *sets, short=False)
    run.until_step(34)
    kill_everything(run)
    run = Launched(tmp_path / "killed", *sets, short=False)
    assert run.wait(200) == 0, run.text[-4000:]
    assert last_parameters(tmp_path / "killed") == last_parameters(tmp_path / "calm")


@pytest.mark.timeout(200)
def test_sigterm_saves_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    sets = (*SETS, "training.steps=80", "checkpoint.every=1000", "cluster.preemption_grace_seconds=20")
    run = Launched(tmp_path / "run", *sets, short=False)
    run.until_step(5)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(25) == 130, run.text
    step = run.summary["steps"]
    run = Launched(tmp_path / "run", *sets, short=False)
    assert run.wait(120) == 0, run.text
    assert f"the run goes on from the checkpoint of step {step}" in run.text
    assert faults(run.run_dir) == []
