"""The launcher makes a run's keys, and takes them away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.cluster.host import _door_of
from asyncrl.cluster.launch import _close_door, open_door
from asyncrl.cluster.spec import RunSpec
from asyncrl.config.load import load_mapping
from asyncrl.errors import UserError
from asyncrl.transport import security
from asyncrl.transport.hosts import EVERYWHERE
from asyncrl.transport.keys import FOLDER, make_keys
from asyncrl.transport.security import Door
from tests.config.samples import MINIMAL


def spec(run_dir: Path, bind_address: str) -> RunSpec:
    config = load_mapping(MINIMAL, [f"cluster.bind_address={bind_address}"]).config
    return RunSpec(config.to_mapping(), str(run_dir), "abc", ())


def test_a_launch_beyond_loopback_has_keys_until_its_end(tmp_path):
    try:
        open_door(spec(tmp_path, EVERYWHERE))
        launcher = security.door()
        assert launcher.keys is not None
        row = _door_of(spec(tmp_path, EVERYWHERE))
        assert replace(row, reached_at=launcher.reached_at) == launcher, "every process of the run has the same keys"
    finally:
        _close_door(tmp_path)
    assert security.door() == Door()
    assert not (tmp_path / FOLDER).exists()


def test_a_launch_on_loopback_leaves_no_keys_of_an_earlier_one(tmp_path):
    make_keys(tmp_path)
    open_door(spec(tmp_path, "127.0.0.1"))
    assert security.door() == Door()
    assert not (tmp_path / FOLDER).exists()


def test_keys_that_cannot_be_written_are_the_users_to_mend(tmp_path):
    (tmp_path / "a file").touch()
    with pytest.raises(UserError, match="the run's keys cannot be written"):
        open_door(spec(tmp_path / "a file", EVERYWHERE))
