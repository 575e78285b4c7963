"""Whole runs that must learn: the quickstart's settings with one thing changed. Minutes each, on two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import Launched, asyncrl

pytestmark = [pytest.mark.long, pytest.mark.end_to_end, pytest.mark.timeout(900)]


def learned(run_dir: Path, *sets: str) -> dict[str, Any]:
    """The summary of a quickstart run with these settings, which finished with a clean audit."""
    run = Launched(run_dir, *sets, short=False)
    assert run.wait(800) == 0, run.text[-4000:]
    audit = run.command("audit")
    assert audit.returncode == 0, audit.stdout
    return run.summary


def gain(summary: dict[str, Any]) -> float:
    """From the first evaluation to the last."""
    return float(summary["eval"]["last"] - summary["eval"]["first"])


def exported(run_dir: Path) -> Path:
    """The newest checkpoint of a run as a model folder."""
    to = run_dir.with_name(f"{run_dir.name}-exported")
    export = asyncrl("export", str(run_dir), "--to", str(to))
    assert export.returncode == 0, export.stderr
    return to


def test_a_student_comes_within_five_points_of_its_teacher(tmp_path: Path) -> None:
    """The teacher is what the quickstart ends with, the student what it begins with; no reward is used."""
    taught = learned(tmp_path / "teacher", "checkpoint.every=500")
    path = exported(tmp_path / "teacher")
    student = learned(tmp_path / "student", "algorithm.advantage=distillation", f"algorithm.teacher.path={path}")
    assert taught["eval"]["last"] >= 0.8
    assert student["eval"]["last"] >= taught["eval"]["last"] - 0.05


def test_remax_learns(tmp_path: Path) -> None:
    assert gain(learned(tmp_path / "run", "algorithm.advantage=remax")) >= 0.2
