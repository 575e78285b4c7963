"""How learning runs are made: the quickstart, whole, with a few keys set otherwise."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.runs import Launched
from tests.end_to_end.test_short_runs import assert_sound


def learned(folder: Path, *sets: str, seconds: float = 400) -> tuple[float, float]:
    """The first and the last evaluation of a run that must end well."""
    run = Launched(folder / "run", *sets, short=False)
    assert run.wait(seconds) == 0, run.text
    assert_sound(run)
    evaluation = run.summary["eval"]
    print(f"eval {evaluation['first']:.3f} → {evaluation['last']:.3f}  {' '.join(sets)}")
    return evaluation["first"], evaluation["last"]
