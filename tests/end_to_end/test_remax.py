"""ReMax from end to end: a greedy response to each prompt is the baseline of its samples."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.end_to_end.runs import Launched
from tests.end_to_end.test_short_runs import assert_sound

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]


def rows_of_one_token(path: Path) -> Path:
    """Sums of one digit, each answered with exactly one token."""
    sums = [(a, b) for a in range(4) for b in range(5)]
    rows = [
        {"prompt": f"{a}+{b}+1=", "ground_truth": str(a + b + 1), "sampling": {"max_new_tokens": 1, "ignore_eos": True}}
        for a, b in sums
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_advantage_is_the_reward_less_that_of_the_greedy_response(tmp_path: Path) -> None:
    """Responses of one token, so that means over tokens are means over responses."""
    rows = rows_of_one_token(tmp_path / "rows.jsonl")
    run = Launched(
        tmp_path / "run",
        "algorithm.advantage=remax",
        f"data.train={rows}",
        "rollout.on_stale=wait",
        "training.filter=drop",
        "tracking.samples_per_step=1000",
    )
    assert run.wait() == 0, run.text
    assert_sound(run)
    advantages = defaultdict(list)
    for sample in run.lines("samples.jsonl"):
        assert sample["state"] == "trained"
        advantages[sample["step"]].append(sample["reward"] - sample["greedy_reward"])
    metrics = {row["step"]: row for row in run.lines("metrics.jsonl")}
    assert advantages
    for step, values in advantages.items():
        assert metrics[step]["advantage/mean"] == pytest.approx(sum(values) / len(values), abs=1e-6)
        assert metrics[step]["advantage/abs_mean"] == pytest.approx(sum(map(abs, values)) / len(values), abs=1e-6)
    assert all(0 <= row["greedy/reward"] <= 1 for row in metrics.values())
    summary = run.summary
    assert summary["rollout"]["greedy"] > 0
    assert summary["trajectories"]["trained"] == sum(map(len, advantages.values()))


def test_one_sample_to_each_prompt_trains(tmp_path: Path) -> None:
    run = Launched(tmp_path / "run", "algorithm.advantage=remax", "rollout.group_size=1", "reward.min_scored=1")
    assert run.wait() == 0, run.text
    assert_sound(run)
    assert run.summary["samples"]["trained"] > 0
