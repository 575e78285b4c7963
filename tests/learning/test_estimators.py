"""Other estimators, losses and schedules learn the quickstart's task, with its own settings but for what is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learning.runs import learned

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(600)]

REACHING = {
    "gspo": ("algorithm.loss=gspo",),
    "cispo": ("algorithm.loss=cispo",),
    "rloo": ("algorithm.advantage=rloo",),
    "reinforce_pp": ("algorithm.advantage=reinforce_pp",),
    "critic": ("algorithm.advantage=gae", "algorithm.critic.learning_rate=1.0e-3", "training.filter=keep"),
}
LEARNING = {
    "two epochs": ("training.epochs_per_batch=2", "training.steps=250"),
    "two epochs of two mini-batches": ("training.epochs_per_batch=2", "training.mini_batches=2", "training.steps=250"),
    "published every second step": ("training.publish_every=2",),
    "loglinear": ("algorithm.proximal=loglinear",),
}


@pytest.mark.parametrize("name", REACHING)
def test_it_reaches_four_of_five(tmp_path: Path, name: str) -> None:
    _, last = learned(tmp_path, *REACHING[name])
    assert last >= 0.80


@pytest.mark.parametrize("name", LEARNING)
def test_it_learns(tmp_path: Path, name: str) -> None:
    first, last = learned(tmp_path, *LEARNING[name])
    assert last >= first + 0.2


@pytest.mark.timeout(1200)
def test_bounds_end_near_on_policy(tmp_path: Path) -> None:
    """Within 3 points, as the mean over two seeds."""
    last = {bound: _mean_over_seeds(tmp_path, bound) for bound in (0, 1, 2, 4)}
    assert all(last[bound] >= last[0] - 0.03 for bound in last), last


def _mean_over_seeds(folder: Path, bound: int) -> float:
    ends = []
    for seed in (0, 1):
        own = folder / f"{bound}-{seed}"
        own.mkdir()
        ends.append(learned(own, f"seed={seed}", f"rollout.max_staleness={bound}")[1])
    return sum(ends) / len(ends)
