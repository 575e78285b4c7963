"""Whole runs that must learn: the quickstart's settings with one thing changed. Minutes each, on two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import Launched

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


def test_remax_learns(tmp_path: Path) -> None:
    assert gain(learned(tmp_path / "run", "algorithm.advantage=remax")) >= 0.2
