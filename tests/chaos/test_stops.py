"""A second signal ends a run at once, however much the first left it to do, and what it has saved is gone on from."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from asyncrl.checkpoint import Checkpoints
from tests.chaos.test_kills import SETS
from tests.chaos.test_resumes import kill_everything
from tests.end_to_end.runs import Launched, leftovers, until

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]


def test_a_second_signal_ends_a_run_at_once_and_it_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    sets = (*SETS, "training.steps=100000", "queue.durability=process")
    run = Launched(tmp_path / "run", *sets, short=False)
    run.until(lambda: Checkpoints(run.run_dir).newest_complete() is not None, 120, "a checkpoint")
    run.process.send_signal(signal.SIGTERM)
    until(lambda: "once more ends it at once" in run.text, 10, "word of the first signal")
    run.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert run.wait(10) == 130, run.text[-4000:]
    assert time.monotonic() - began < 5
    until(lambda: leftovers(run.run_dir) == [], 15, "a clean end")
    assert run.command("audit").returncode == 0
    again = Launched(tmp_path / "run", *sets, short=False)
    again.until(lambda: "the run goes on from the checkpoint of step" in again.text, 60, "the run goes on")
    kill_everything(again)
