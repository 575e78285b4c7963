"""`launch`: exit codes, output and signals, over a pipeline that starts no process."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncrl.pipeline import Pipeline
from tests.cli.harness import QUICKSTART, asyncrl, ended_run, summary


class FakeRun:
    """Ends by itself, or when it is asked to stop."""

    def __init__(self, run_dir: Path, ending: dict[str, Any], *, wait_for_stop: bool):
        self.run_dir, self.ending, self.resumed = run_dir, ending, ()
        self.stopped = threading.Event()
        self.wait_for_stop = wait_for_stop

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        if self.wait_for_stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert self.stopped.wait(10)
        return self.ending

    def stop(self, seconds: float | None = None) -> None:
        self.stopped.set()


@pytest.fixture
def fake_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces `Pipeline.launch`; returns a function that says how the run ends."""

    def ends(*, wait_for_stop: bool = False, **changes: Any) -> list[FakeRun]:
        made: list[FakeRun] = []

        def launch(self: Pipeline, run_dir: Path | None = None, *, resume: str, progress: bool | None = None) -> FakeRun:
            made.append(FakeRun(run_dir or tmp_path / "run", summary(**changes), wait_for_stop=wait_for_stop))
            return made[-1]

        monkeypatch.setattr(Pipeline, "launch", launch)
        return made

    return ends


def test_a_finished_run_says_what_happened_and_what_to_try_next(fake_launch: Any) -> None:
    fake_launch(reward={"first": 0.41, "last": 0.9}, eval={"first": 0.4, "last": 0.91}, mlflow_run_id="1")
    outcome = asyncrl("launch", QUICKSTART)
    assert (outcome.code, outcome.err) == (0, "")
    for words in ("run directory:", "finished: 300 steps", "0.400 → 0.910", "asyncrl samples", "asyncrl audit", "mlflow ui"):
        assert words in outcome.out


def test_a_finished_run_prints_one_json_object_when_json_is_asked(fake_launch: Any) -> None:
    fake_launch()
    outcome = asyncrl("launch", QUICKSTART, "--json")
    assert outcome.code == 0
    assert outcome.json["status"] == "finished"
    assert outcome.json["run_dir"]


def test_a_failed_run_exits_with_one_and_names_its_error(fake_launch: Any) -> None:
    fake_launch(status="failed", error="service trainer/0 died: killed", steps=7)
    outcome = asyncrl("launch", QUICKSTART)
    assert outcome.code == 1
    assert "service trainer/0 died: killed" in outcome.err
    assert "logs" in outcome.err


def test_sigterm_stops_the_run_and_exits_with_130(fake_launch: Any) -> None:
    made = fake_launch(status="interrupted", wait_for_stop=True)
    before = signal.getsignal(signal.SIGTERM)
    outcome = asyncrl("launch", QUICKSTART)
    assert outcome.code == 130
    assert made[0].stopped.is_set()
    assert "interrupted: 300 steps" in outcome.out
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_folder_that_holds_a_run_is_refused_with_the_fix(tmp_path: Path) -> None:
    outcome = asyncrl("launch", QUICKSTART, "--resume", "never", "--run-dir", ended_run(tmp_path / "run"))
    assert outcome.code == 2
    assert "already holds a run" in outcome.err


def test_the_next_try_is_this_run_with_its_overrides(fake_launch: Any, tmp_path: Path) -> None:
    fake_launch()
    outcome = asyncrl("launch", QUICKSTART, "--set", "seed=3", "--run-dir", tmp_path)
    assert f"asyncrl launch {tmp_path}/config.yaml --set rollout.max_staleness=0" in outcome.out


def test_the_next_try_is_one_that_is_not_refused(fake_launch: Any, tmp_path: Path) -> None:
    fake_launch()
    said = asyncrl("launch", QUICKSTART, "--set", "training.mini_batches=2", "--set", "training.publish_every=2").out
    command = next(line for line in said.splitlines() if "asyncrl launch" in line).split("   ")[0].split()[2:]
    overrides = [word for word in command if "=" in word]
    assert overrides == ["rollout.max_staleness=0", "training.publish_every=1", "training.mini_batches=1"]
    asked = ["training.mini_batches=2", "training.publish_every=2"]
    Pipeline.from_yaml(QUICKSTART, [*asked, *overrides])


def test_the_next_try_after_a_preset_leaves_the_preset(fake_launch: Any, tmp_path: Path) -> None:
    fake_launch()
    asked = ["rollout.max_staleness=1", "rollout.on_stale=wait", "rollout.preset=one_step_off"]
    said = asyncrl("launch", QUICKSTART, *(word for override in asked for word in ("--set", override))).out
    command = next(line for line in said.splitlines() if "asyncrl launch" in line).split("   ")[0].split()[2:]
    overrides = [word for word in command if "=" in word]
    assert overrides == ["rollout.preset=null", "rollout.max_staleness=0"]
    Pipeline.from_yaml(QUICKSTART, [*asked, *overrides])


def test_an_adapted_bound_is_summed_up(fake_launch: Any) -> None:
    fake_launch(staleness={"bound": 8, "max": 5, "mean": 1.5, "bound_mean": 2.7, "bound_last": 3})
    said = asyncrl("launch", QUICKSTART).out
    assert "most 5 of the 8 versions allowed; the bound was 2.7 on average, 3 at the end" in said


def test_figures_that_mlflow_did_not_take_are_spoken_of(fake_launch: Any, tmp_path: Path) -> None:
    (tmp_path / "mlflow_spool.jsonl").write_text("")
    fake_launch(status="failed", error="x")
    outcome = asyncrl("launch", QUICKSTART, "--run-dir", tmp_path)
    assert f"python -m asyncrl.tracking.replay {tmp_path}" in outcome.err


def test_notes_of_the_plan_are_said_and_so_is_an_early_end_of_the_data(fake_launch: Any) -> None:
    fake_launch(steps=49)
    said = asyncrl("launch", QUICKSTART, "--set", "data.epochs=1").out
    assert "note: data.train has 796 rows, visited 1 times" in said
    assert "note: the data ended before 500 steps were trained" in said
