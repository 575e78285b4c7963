"""The staleness bound on the real pipeline, when half of the rows ask for answers ten times longer than the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.runs import Launched
from tests.end_to_end.test_short_runs import assert_sound

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(300)]
SHORT_TOKENS = 6


def write_rows(path: Path) -> Path:
    """Every other row asks for ten times as many tokens."""
    lines = []
    for number in range(200):
        a, b, c = number % 10, number // 10 % 10, number // 7 % 10
        tokens = SHORT_TOKENS * (10 if number % 2 else 1)
        row = {
            "prompt": f"{a}+{b}+{c}=",
            "ground_truth": str(a + b + c),
            "sampling": {"max_new_tokens": tokens, "ignore_eos": True},
        }
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize("on_stale", ["mask", "reissue", "wait"])
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_the_bound_is_reached_and_never_passed(tmp_path: Path, bound: int, on_stale: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    run = Launched(
        tmp_path / "run",
        f"data.train={rows}",
        f"rollout.max_staleness={bound}",
        f"rollout.on_stale={on_stale}",
        f"rollout.max_response_tokens={10 * SHORT_TOKENS}",
        "reward.functions=[{function: contains}]",
        "training.filter=keep",
        "training.steps=40",
    )
    assert run.wait(240) == 0, run.text
    assert_sound(run)
    assert min(1, bound) <= run.summary["staleness"]["max"] <= bound
    if on_stale == "wait":
        assert run.summary["samples"]["expired"] == 0
        assert run.summary["samples"]["failed"] == 0
        assert run.summary["samples"]["trained"] == 40 * 4
