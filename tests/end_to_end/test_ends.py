"""How runs end when they are asked to, and when a process dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import Launched, leftovers, pids_of, until

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]
ENDLESS = ("training.steps=100000",)
ROWS = ("rollouter", "message_queue", "parameter_sync", "reward", "reward/0", "trainer/0", "inference/0")


def test_stop_ends_a_run_as_interrupted_and_leaves_nothing(tmp_path: Path) -> None:
    run = Launched(tmp_path / "run", *ENDLESS)
    run.until_step(2)
    stop = run.command("stop")
    assert stop.returncode == 0, stop.stderr
    assert run.wait(60) == 130, run.text
    assert run.summary["status"] == "interrupted"
    assert leftovers(run.run_dir) == []
    assert run.command("audit").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_as_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    run = Launched(tmp_path / "run", *ENDLESS)
    run.until_step(1)
    run.process.send_signal(number)
    assert run.wait(60) == 130, run.text
    assert run.summary["status"] == "interrupted"
    assert leftovers(run.run_dir) == []


def kill_and_see(tmp_path: Path, row: str, *sets: str) -> None:
    """A run that keeps nothing ends at a loss, by the name of what was lost."""
    run = Launched(tmp_path / "run", *ENDLESS, *sets)
    run.until_step(2)
    pid = pids_of(run.status())[row]
    os.kill(pid, signal.SIGKILL)
    assert run.wait(30) == 1, run.text
    assert run.summary["status"] == "failed"
    assert f"service {row} died" in run.summary["error"]
    assert f"service {row} died" in run.text
    until(lambda: leftovers(run.run_dir) == [], 5, "a clean end")
    assert run.command("audit").returncode == 0


@pytest.mark.parametrize("row", ["message_queue"])
def test_a_killed_service_ends_the_run_by_its_name(tmp_path: Path, row: str) -> None:
    kill_and_see(tmp_path, row)


@pytest.mark.long
@pytest.mark.parametrize("row", [*ROWS, "trainer/1", "inference/1"])
def test_any_killed_service_ends_the_run_by_its_name(tmp_path: Path, row: str) -> None:
    kill_and_see(tmp_path, row, "training.ranks=2", "inference.servers=2")
