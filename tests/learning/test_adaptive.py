"""`rollout.max_staleness: auto` against fixed bounds on the quickstart task: reward at equal wall time, where generation is about
three times as dear as training, and the reverse.

Neither way of making a side dear changes what is learned: fewer sequences decoded at once, or smaller micro-batches. How dear it
is, an on-policy run says, where the two take turns. `auto` may never be below the worst of the fixed bounds, two seeds together.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import Launched

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(3600)]

DEAR = {"generation": ("inference.max_batch=8",), "training": ("training.microbatch_tokens=96",)}
FIXED = (1, 4, 16)
SEEDS = (0, 1)
STEPS = 150
LAST = 20  # steps whose rewards are averaged: 2,560 responses
NOISE = 0.02  # of a difference between two such means of two seeds each


def metrics_of(folder: Path, *sets: str, steps: int = STEPS) -> list[dict[str, Any]]:
    run = Launched(folder, *sets, f"training.steps={steps}", "eval.every=0", "eval.samples=64", short=False)
    assert run.wait(900) == 0, run.text
    return run.lines("metrics.jsonl")


def seconds_a_side(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of a run whose sides take turns: the trainer's wait is generation and scoring, the rest is training."""
    return {
        "generation": statistics.median(row["time/wait_s"] for row in rows[5:]),
        "training": statistics.median(row["time/train_s"] for row in rows[5:]),
    }


def reward_at(rows: list[dict[str, Any]], seconds: float) -> float:
    """Mean reward of the last steps that were finished so many seconds after the first one."""
    spent, done = 0.0, []
    for row in rows[1:]:
        spent += row["time/step_s"]
        if spent > seconds:
            break
        done.append(row["reward/mean"])
    return statistics.fmean(done[-LAST:])


@pytest.mark.parametrize("dear", DEAR)
def test_an_adaptive_bound_is_never_below_the_worst_fixed_one(tmp_path: Path, dear: str) -> None:
    alone = seconds_a_side(metrics_of(tmp_path / "turns", *DEAR[dear], "rollout.max_staleness=0", steps=25))
    cheap = "training" if dear == "generation" else "generation"
    ratio = alone[dear] / alone[cheap]
    assert 2 <= ratio <= 6, alone
    bounds = {str(bound): (f"rollout.max_staleness={bound}",) for bound in FIXED}
    bounds["auto"] = ("rollout.max_staleness=auto", "rollout.staleness_floor=1", "rollout.staleness_ceiling=16")
    runs = {
        (name, seed): metrics_of(tmp_path / f"{name}-{seed}", *DEAR[dear], *sets, f"seed={seed}")
        for seed in SEEDS
        for name, sets in bounds.items()
    }
    equal = min(sum(row["time/step_s"] for row in rows[1:]) for rows in runs.values())
    rewards = {name: statistics.fmean(reward_at(runs[name, seed], equal) for seed in SEEDS) for name in bounds}
    adapted = [row["staleness/bound"] for row in runs["auto", SEEDS[0]]]
    told = {"dear": dear, "ratio": ratio, "seconds": equal, "rewards": rewards, "auto's last bound": adapted[-1]}
    print(json.dumps(told))
    assert rewards["auto"] >= min(rewards[str(bound)] for bound in FIXED) - NOISE, told
