"""Whole runs that are held near a reference model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import Launched

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]

ON_POLICY = (
    "rollout.max_staleness=0",
    "training.filter=keep",
    "checkpoint.every=3",
    "training.learning_rate=1e-3",
    "training.schedule=constant",
    "training.final_learning_rate_factor=0",
)
IN_THE_LOSS = (
    "algorithm.kl={name: k3, coefficient: 0.05, adaptive: {target: 0.0001, horizon: 200}}",
    "algorithm.reference.refresh_every=4",
    "algorithm.entropy_coefficient=0.01",
)


def divergences(run: Launched) -> list[tuple[float, float]]:
    """(kl/mean, kl/coefficient) of each step."""
    return [(row["kl/mean"], row["kl/coefficient"]) for row in run.lines("metrics.jsonl")]


def test_a_run_that_is_stopped_half_way_and_goes_on_is_the_undisturbed_one(tmp_path: Path) -> None:
    """To the bit: reference, coefficient and all that follows from them."""
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    undisturbed = Launched(whole, *ON_POLICY, *IN_THE_LOSS)
    assert undisturbed.wait() == 0, undisturbed.text
    first = Launched(halved, *ON_POLICY, *IN_THE_LOSS, "training.steps=5")
    assert first.wait() == 0, first.text
    second = Launched(halved, *ON_POLICY, *IN_THE_LOSS)
    assert second.wait() == 0, second.text
    found = divergences(undisturbed)
    assert divergences(second) == found
    assert [row["kl/reference_version"] for row in second.lines("metrics.jsonl")] == [0, 0, 0, 0, 4, 4]
    assert [kl == 0.0 for kl, _ in found] == [True, False, False, False, True, False]
    assert len({coefficient for _, coefficient in found}) == len(found)
    assert undisturbed.lines("metrics.jsonl")[-1]["loss/entropy"] < 0
    assert undisturbed.command("audit").returncode == 0


def test_two_ranks_with_the_divergence_in_the_reward(tmp_path: Path) -> None:
    run = Launched(
        tmp_path / "run",
        "algorithm.kl={name: k1, coefficient: 0.1, where: reward}",
        "algorithm.advantage=reinforce_pp",
        "training.filter=keep",
        "training.ranks=2",
    )
    assert run.wait() == 0, run.text
    rows = run.lines("metrics.jsonl")
    assert rows[0]["kl/mean"] == rows[0]["kl/reward_mean"] == 0.0
    assert any(row["kl/reward_mean"] for row in rows[1:])
    assert run.summary["status"] == "finished"
    assert run.command("audit").returncode == 0
