"""The staleness bound on the real pipeline, when half of the rows ask for answers ten times longer than the others."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.end_to_end.runs import QUICKSTART, Launched
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


def test_one_step_off_generates_the_next_batch_while_one_trains_and_nothing_expires(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline.yaml"
    lines = QUICKSTART.read_text().splitlines(keepends=True)
    left = "".join(line for line in lines if not line.strip().startswith(("max_staleness:", "on_stale:")))
    pipeline.write_text(left.replace("rollout:\n", "rollout:\n  preset: one_step_off\n"))
    run = Launched(tmp_path / "run", "training.filter=keep", "training.steps=40", pipeline=pipeline)
    assert run.wait(240) == 0, run.text
    assert_sound(run)
    assert run.summary["staleness"]["max"] == run.summary["staleness"]["bound"] == 1
    assert (run.summary["samples"]["expired"], run.summary["samples"]["trained"]) == (0, 40 * 4)
    again = Launched(tmp_path / "again", pipeline=run.run_dir / "config.yaml", short=False)
    assert again.wait(240) == 0, again.text
    assert (again.run_dir / "config.yaml").read_text() == (run.run_dir / "config.yaml").read_text()


def test_an_adaptive_bound_stays_in_its_range_and_is_told(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    run = Launched(
        tmp_path / "run",
        f"data.train={rows}",
        "rollout.max_staleness=auto",
        "rollout.staleness_ceiling=4",
        f"rollout.max_response_tokens={10 * SHORT_TOKENS}",
        "reward.functions=[{function: contains}]",
        "training.filter=keep",
        "training.steps=80",
    )
    assert run.wait(240) == 0, run.text
    assert_sound(run)
    bounds = [row["staleness/bound"] for row in run.lines("metrics.jsonl")]
    assert bounds[0] == 1
    assert max(bounds) <= run.summary["staleness"]["bound"] == 4
    assert all(abs(later - earlier) <= 1 for earlier, later in pairwise(bounds))
    assert run.summary["staleness"]["bound_mean"] == pytest.approx(sum(bounds) / len(bounds))
    changes = sum(later != earlier for earlier, later in pairwise(bounds))
    said = (run.run_dir / "logs" / "trainer-0.log").read_text().count("staleness bound")
    assert changes <= said <= changes + 1, "a line for each change; one after the last step has no row"
