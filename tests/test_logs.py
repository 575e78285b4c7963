"""Log files that cannot be written."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from asyncrl import logs

log = logging.getLogger("asyncrl.test")


def test_a_folder_that_went_away_costs_lines_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    end = logs.copy_to_file(tmp_path / "run", "launcher")
    try:
        shutil.rmtree(tmp_path / "run")
        log.error("nobody can read this")
    finally:
        end()
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    logs.log_path(tmp_path, "launcher").symlink_to("/dev/full")
    end = logs.copy_to_file(tmp_path, "launcher")
    try:
        log.error("nobody can read this")
    finally:
        end()
    assert capfd.readouterr().err == ""
