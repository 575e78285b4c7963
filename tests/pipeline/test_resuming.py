"""Whether a run goes on in its folder, from where, and under which configuration."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from asyncrl.checkpoint import Checkpoints
from asyncrl.config.load import load_config
from asyncrl.errors import UserError
from asyncrl.pipeline import resuming
from asyncrl.pipeline.resuming import finished_summary, folder_to_resume
from asyncrl.pipeline.run_dir import claim_run_dir

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"
DEAD = 2**22 + 1  # more than Linux gives to any process


def config(*overrides: str):
    return load_config(QUICKSTART, overrides).config


def take_over(run: Path, config, *, keep: bool = False):
    taken = resuming.take_over(run, config)
    if not keep:
        taken.lock.close()
    return taken


def died_run(folder: Path, *, pid: int = DEAD, incarnation: int = 1) -> Path:
    """A run whose launcher is gone without a word."""
    claim_run_dir(folder, config())
    started = {"pid": pid, "rpc": "tcp://127.0.0.1:1", "started": time.time(), "run_id": "x", "name": "quickstart"}
    (folder / "run.json").write_text(json.dumps({**started, "incarnation": incarnation, "mlflow_run_id": "m"}))
    return folder


def finished_run(folder: Path) -> Path:
    died_run(folder)
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "steps": config().training.steps}))
    return folder


def checkpoint(folder: Path, step: int) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.begin(step)
    state = {"step": step, "version": step, "incarnation": 1, "world_size": 1, "wall_s": 1.0, "config": {}, "tally": {}}
    checkpoints.commit(step, {**state, "best": None})


def test_which_folder_goes_on(tmp_path):
    run, new = died_run(tmp_path / "run"), tmp_path / "new"
    assert folder_to_resume("never", run) is None
    assert folder_to_resume("auto", None) is None
    assert folder_to_resume("auto", new) is None
    assert folder_to_resume("auto", run) == run
    assert folder_to_resume(str(run), None) == run
    assert folder_to_resume(str(run), run) == run
    with pytest.raises(UserError, match="holds no run"):
        folder_to_resume(str(new), None)
    with pytest.raises(UserError, match="leave one of the two out"):
        folder_to_resume(str(run), new)


def test_the_newest_complete_checkpoint_is_where_it_goes_on(tmp_path):
    run = died_run(tmp_path / "run", incarnation=3)
    checkpoint(run, 10)
    checkpoint(run, 20)
    Checkpoints(run).begin(30)
    (run / "summary.json").write_text("{}")
    taken = take_over(run, config())
    assert (taken.resume.step, taken.resume.incarnation, taken.mlflow_run_id) == (20, 4, "m")
    assert Path(taken.resume.checkpoint).name == "step_000020"
    assert (taken.resume.wall_s, taken.resume.launches) == (1.0, 2)
    assert sorted(path.name for path in (run / "checkpoints").glob("*step*")) == ["step_000010", "step_000020"]
    assert not (run / "summary.json").exists()


def test_without_a_checkpoint_it_begins_anew_in_the_same_folder(tmp_path):
    taken = take_over(died_run(tmp_path / "run"), config())
    assert (taken.resume.step, taken.resume.checkpoint) == (0, None)
    assert "from step 0" in taken.words()[0]


def test_a_run_that_died_before_it_could_say_so_goes_on(tmp_path):
    claim_run_dir(tmp_path / "run", config())
    assert take_over(tmp_path / "run", config()).resume.incarnation == 2


def test_what_may_change_does_and_is_said(tmp_path):
    run = died_run(tmp_path / "run")
    taken = take_over(run, config("training.learning_rate=0.25", "training.ranks=2"))
    assert taken.changed == ("training.ranks was 1 and is 2", "training.learning_rate was 0.0005 and is 0.25")
    assert load_config(run / "config.yaml").config.training.ranks == 2
    assert load_config(run / "config.1.yaml").config.training.ranks == 1
    (run / "run.json").write_text(json.dumps({"pid": DEAD, "started": time.time(), "incarnation": 2}))
    assert take_over(run, config()).resume.launches == 3


def test_a_launcher_that_dies_while_it_takes_over_leaves_a_run_that_goes_on(tmp_path, monkeypatch):
    run = died_run(tmp_path / "run")

    def killed(self, target):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(SystemExit):
            take_over(run, config("training.ranks=2"))
    assert load_config(run / "config.yaml").config.training.ranks == 1
    assert take_over(run, config("training.ranks=2")).changed == ("training.ranks was 1 and is 2",)


def test_what_may_not_change_is_named_and_nothing_is_touched(tmp_path):
    run = died_run(tmp_path / "run")
    with pytest.raises(UserError, match="seed was 0 and is 7, but the prompt order") as refusal:
        take_over(run, config("seed=7", "rollout.group_size=4"))
    assert "rollout.group_size was 8 and is 4" in str(refusal.value)
    assert not (run / "config.1.yaml").exists()
    assert take_over(run, config()).resume.incarnation == 2


def test_a_run_that_lives_is_left_alone(tmp_path):
    with pytest.raises(UserError, match="is going on"):
        take_over(died_run(tmp_path / "run", pid=os.getpid()), config())


def test_no_two_launchers_go_on_with_one_run(tmp_path):
    run = died_run(tmp_path / "run")
    first = take_over(run, config(), keep=True)
    with pytest.raises(UserError, match="is going on"):
        take_over(run, config())
    first.lock.close()
    assert take_over(run, config()).resume.incarnation == 2
    resuming.lock_new(claim_run_dir(tmp_path / "other", config())).close()


def test_a_finished_run_has_its_summary_unless_more_steps_are_asked(tmp_path):
    run = finished_run(tmp_path / "run")
    assert finished_summary(run, config())["status"] == "finished"
    assert finished_summary(run, config("training.steps=10"))["status"] == "finished"
    assert finished_summary(run, config("training.steps=10000")) is None
    assert finished_summary(died_run(tmp_path / "died"), config()) is None
