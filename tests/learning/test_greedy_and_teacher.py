"""What compares a sample with something beside its group: the greedy response, and a teacher's word on every token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import asyncrl
from tests.learning.runs import learned

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(900)]


def test_remax_learns(tmp_path: Path) -> None:
    first, last = learned(tmp_path, "algorithm.advantage=remax")
    assert last >= first + 0.2


def test_a_student_comes_within_five_points_of_its_teacher(tmp_path: Path) -> None:
    """The teacher is what the quickstart ends with, the student what it begins with; no reward is used."""
    folders = [tmp_path / name for name in ("teacher", "student")]
    for folder in folders:
        folder.mkdir()
    _, taught = learned(folders[0], "checkpoint.every=500")
    path = exported(folders[0] / "run")
    _, last = learned(folders[1], "algorithm.advantage=distillation", f"algorithm.teacher.path={path}")
    assert last >= taught - 0.05


def exported(run_dir: Path) -> Path:
    """The newest checkpoint of a run as a model folder."""
    to = run_dir.with_name("exported")
    export = asyncrl("export", str(run_dir), "--to", str(to))
    assert export.returncode == 0, export.stderr
    return to
