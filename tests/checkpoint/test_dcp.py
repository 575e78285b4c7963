"""Tensors in files: what goes in comes out, errors in words, and kill -9 at any moment of a save."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import time
import warnings
from contextlib import contextmanager

import pytest
import torch

from asyncrl.checkpoint import Checkpoints
from asyncrl.checkpoint.dcp import DcpFiles
from asyncrl.errors import CheckpointError
from tests.checkpoint.saves import state_of

ROUNDS = 40


def tensors(value, size=4000):
    return {f"t{index}": torch.full((size,), float(value)) for index in range(8)} | {"number": torch.tensor(float(value))}


def read_back(folder):
    found = {name: torch.full_like(tensor, -1) for name, tensor in tensors(0).items()}
    DcpFiles().read(str(folder), found)
    return found


def test_what_was_written_is_read_and_described(tmp_path):
    DcpFiles().write(str(tmp_path), tensors(3), None)
    assert all(torch.equal(found, tensors(3)[name]) for name, found in read_back(tmp_path).items())
    described = DcpFiles().describe(str(tmp_path))
    assert described["t0"] == ((4000,), "float32")
    assert described["number"] == ((), "float32")


def test_a_tensor_that_is_not_there_or_of_another_shape_is_refused_by_name(tmp_path):
    DcpFiles().write(str(tmp_path), tensors(3), None)
    with pytest.raises(CheckpointError, match="missing"):
        DcpFiles().read(str(tmp_path), {"missing": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="t0"):
        DcpFiles().read(str(tmp_path), {"t0": torch.zeros(5)})


@pytest.mark.parametrize("damage", ["cut", "overwritten", "gone"])
def test_damaged_data_is_a_checkpoint_error(tmp_path, damage):
    DcpFiles().write(str(tmp_path), tensors(3), None)
    data = tmp_path / "__0_0.distcp"
    match damage:
        case "cut":
            os.truncate(data, 1000)
        case "overwritten":
            data.write_bytes(b"\xff" * data.stat().st_size)
        case "gone":
            data.unlink()
    with pytest.raises(CheckpointError):
        read_back(tmp_path)


@contextmanager
def files_up_to(size):
    """No file of this process grows beyond `size` bytes: what a full disk looks like."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 5_000, 130_000])
def test_a_full_disk_is_said_with_its_fix(tmp_path, room):
    with files_up_to(room), pytest.raises(CheckpointError, match=r"gave 'File too large': make room on the disk"):
        DcpFiles().write(str(tmp_path), tensors(3), None)


def test_a_folder_that_is_no_place_to_write_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="Not a directory"):
        DcpFiles().write(str(tmp_path / "file" / "below"), tensors(3), None)


# ---- kill -9 ---------------------------------------------------------------------------------------------------


def save_for_ever(run_dir, first):
    checkpoints, files = Checkpoints(run_dir, keep=2), DcpFiles()
    for step in itertools.count(first):
        files.write(str(checkpoints.begin(step)), tensors(step), None)
        checkpoints.commit(step, state_of(step))
        checkpoints.prune()


def in_a_child(work):
    """The process id of a fork of this process that does `work` and nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        work()
    finally:
        os._exit(1)


def seconds_of_a_save(run_dir):
    checkpoints = Checkpoints(run_dir)
    began = time.monotonic()
    DcpFiles().write(str(checkpoints.begin(1)), tensors(1), None)
    checkpoints.commit(1, state_of(1))
    return time.monotonic() - began


def test_killed_at_any_moment_of_a_save_the_newest_complete_one_loads_whole(tmp_path):
    checkpoints, moments = Checkpoints(tmp_path), random.Random(0)
    newest, left_half_written = 0, 0
    save_seconds = seconds_of_a_save(tmp_path / "measured")
    for _ in range(ROUNDS):
        pid = in_a_child(lambda first=newest + 1: save_for_ever(tmp_path, first))
        time.sleep(moments.uniform(0.0, 4 * save_seconds))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        left_half_written += any(path.name.endswith(".writing") for path in checkpoints.folder.glob(".*"))
        info = checkpoints.newest_complete()
        if info is not None:
            assert info.step >= newest
            newest = info.step
            assert all(torch.equal(found, tensors(newest)[name]) for name, found in read_back(info.folder).items())
        else:
            assert newest == 0, "once there is a complete one, there always is"
        checkpoints.sweep_incomplete()
    assert newest > ROUNDS // 8, "saves came to their end"
    assert left_half_written > ROUNDS // 8, "and others were cut short"
