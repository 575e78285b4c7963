"""Folders of checkpoints: complete or absent, the newest and the best kept, damage seen."""

from __future__ import annotations

import json
import logging
import os
import shutil
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.checkpoint import Checkpoints, read_checkpoint
from asyncrl.errors import CheckpointError
from tests.checkpoint.saves import save, state_of


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_checkpoint_has_its_name_when_it_is_complete_and_not_before(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.begin(120)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    assert checkpoints.newest_complete() is None
    info = checkpoints.commit(120, state_of(120))
    assert names(tmp_path) == ["step_000120"]
    assert (info.step, info.version, info.folder.name, info.bytes) == (120, 120, "step_000120", 2)
    state = json.loads((info.folder / "state.json").read_text())
    assert state == {"format": 1, **state_of(120), "files": {"model/config.json": 2}}
    assert checkpoints.newest_complete() == read_checkpoint(info.folder) == info


def test_the_newest_is_the_one_of_the_highest_step(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (999_999, 1_000_000, 30):
        save(checkpoints, step)
    assert checkpoints.newest_complete().step == 1_000_000
    assert [info.step for info in checkpoints.complete()] == [30, 999_999, 1_000_000]


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.begin(1) / "half").write_text("x")
    checkpoints.abandon(1)
    assert names(tmp_path) == []


def test_what_a_dead_process_left_is_swept_and_no_complete_one_is_touched(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    (checkpoints.begin(2) / "half").write_text("x")
    (tmp_path / "checkpoints" / ".step_000001.removed").mkdir()
    checkpoints.sweep_incomplete()
    assert names(tmp_path) == ["step_000001"]
    Checkpoints(tmp_path / "none").sweep_incomplete()


def test_a_step_that_is_saved_again_takes_the_place_of_the_first(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 4, {"a": b"old"})
    info = save(checkpoints, 4, {"b": b"newer"})
    assert info.state["files"] == {"b": 5}
    assert names(tmp_path) == ["step_000004"]


@pytest.mark.parametrize("damage", ["a file is cut", "a file is missing", "no state", "half a state", "no object", "a field"])
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(tmp_path, damage, caplog):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    folder = save(checkpoints, 2).folder
    state = folder / "state.json"
    match damage:
        case "a file is cut":
            os.truncate(folder / "__0_0.distcp", 3)
        case "a file is missing":
            (folder / "__0_0.distcp").unlink()
        case "no state":
            state.unlink()
        case "half a state":
            os.truncate(state, 40)
        case "no object":
            state.write_text("[]")
        case "a field":
            state.write_text(json.dumps({key: value for key, value in json.loads(state.read_text()).items() if key != "tally"}))
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest_complete().step == 1
    assert "step_000002 is not" in caplog.text
    with pytest.raises(CheckpointError, match="use another one"):
        read_checkpoint(folder)


def test_another_format_is_refused_by_its_number_and_not_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    folder = save(checkpoints, 2).folder
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": 9}))
    with pytest.raises(CheckpointError, match="is of format 9: use the version of asyncrl that wrote it"):
        checkpoints.newest_complete()
    assert [info.step for info in checkpoints.complete()] == [1]


def test_a_folder_that_was_deleted_while_it_was_written_is_an_error_and_the_one_before_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    shutil.rmtree(checkpoints.begin(2))
    with pytest.raises(CheckpointError, match=r"leave .*checkpoints alone while the run lives"):
        checkpoints.commit(2, state_of(2))
    assert checkpoints.newest_complete().step == 1


def test_a_place_that_cannot_be_written_is_an_error_with_the_systems_word_and_a_fix(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"gave 'Not a directory': look at the disk|gave 'File exists': look at the disk"):
        Checkpoints(tmp_path).begin(1)


@contextmanager
def closed_to_us(folder, *, looking_through=True):
    """Nobody may do anything in this folder, but look through it where that is said; root neither."""
    above = [each for each in folder.parents if not each.stat().st_mode & 0o001]
    modes = {each: each.stat().st_mode for each in (folder, *above)}
    for each in above:
        each.chmod(modes[each] | 0o011)
    folder.chmod(0o111 if looking_through else 0)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)
        for each, mode in modes.items():
            each.chmod(mode)


def test_a_folder_that_one_may_not_write_to_is_an_error_with_its_fix_and_what_was_there_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, best="m")
    save(checkpoints, 1)
    (checkpoints.begin(3) / "__0_0.distcp").write_bytes(b"weights")
    with closed_to_us(checkpoints.folder):
        for write in (
            lambda: checkpoints.begin(2),
            lambda: checkpoints.commit(3, state_of(3)),
            lambda: checkpoints.record({1: 0.5}),
        ):
            with pytest.raises(CheckpointError, match="gave 'Permission denied': give this user the right to read and write"):
                write()
        assert checkpoints.prune() == []
        checkpoints.abandon(3)
    assert checkpoints.newest_complete().step == 1


def test_what_one_may_not_read_is_never_taken_for_nothing(tmp_path):
    """Else a run would go on from an older one, or begin anew, and write over it."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    newest = save(checkpoints, 2).folder
    for folder in (newest, checkpoints.folder):
        with (
            closed_to_us(folder, looking_through=False),
            pytest.raises(CheckpointError, match=r"a checkpoint is read .* gave 'Permission denied': give this user the right"),
        ):
            checkpoints.newest_complete()
    assert checkpoints.newest_complete().step == 2


# ---- what is kept ----------------------------------------------------------------------------------------------


def test_the_newest_ones_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, best="eval/score")
    for step in (10, 20, 30, 40, 50):
        save(checkpoints, step)
    checkpoints.record({0: 0.1, 15: 0.9, 30: 0.5})
    assert checkpoints.best() == 20, "a value holds until there is a newer one"
    assert checkpoints.prune() == [10, 30]
    checkpoints.record({0: 0.1, 15: 0.9, 30: 0.5, 50: 1.0})
    assert checkpoints.best() == 50
    assert checkpoints.prune() == [20]


def test_values_survive_the_process_that_recorded_them_and_belong_to_one_metric(tmp_path):
    checkpoints = Checkpoints(tmp_path, best="eval/score")
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.record({1: 0.7, 2: float("nan")})
    assert Checkpoints(tmp_path, best="eval/score").best() == 1
    assert Checkpoints(tmp_path, best="reward/mean").best() is None
    (tmp_path / "checkpoints" / "scores.json").write_text("{")
    assert Checkpoints(tmp_path, best="eval/score").best() is None


def test_what_was_saved_after_the_resumed_step_is_forgotten(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.forget_after(2)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    checkpoints.forget_after(0)
    assert names(tmp_path) == []
    Checkpoints(tmp_path / "none").forget_after(0)


def test_values_of_a_future_that_will_not_be_choose_no_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, best="m")
    for step, value in ((1, 0.5), (2, 0.1), (3, 0.9)):
        save(checkpoints, step)
        checkpoints.record({step: value})
    checkpoints.forget_after(2)
    save(checkpoints, 3)
    assert checkpoints.best() == 1


def test_what_cannot_be_forgotten_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    with (
        closed_to_us(checkpoints.folder),
        pytest.raises(CheckpointError, match="gave 'Permission denied': give this user the right"),
    ):
        checkpoints.forget_after(0)
    assert checkpoints.newest_complete().step == 1


STEPS = st.sets(st.integers(1, 40), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.integers(1, 4), st.dictionaries(st.integers(0, 40), st.floats(-1, 1)))
def test_whatever_is_removed_the_newest_complete_stays_and_the_best(tmp_path_factory, steps, keep, values):
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run"), keep=keep, best="m")
    for step in sorted(steps):
        save(checkpoints, step)
        checkpoints.record({at: value for at, value in values.items() if at <= step})
        best = checkpoints.best()
        before = [info.step for info in checkpoints.complete()]
        checkpoints.prune()
        left = [info.step for info in checkpoints.complete()]
        assert left[-1] == step
        assert set(left) == set(before[-keep:]) | ({best} if best is not None else set())
