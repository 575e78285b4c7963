"""Advantages against formulas written out in numpy, in float64, and the edge cases of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import RewardBatch, estimate
from asyncrl.config.entries import Grpo, ReinforcePp, Rloo

NAN = float("nan")
ENTRIES = [Grpo(), Grpo(normalize_std=False), Rloo(), ReinforcePp(), ReinforcePp(gamma=0.9)]


def batch(rewards: list[float], groups: list[int], mask: object = None, dtype: torch.dtype = torch.float64) -> RewardBatch:
    mask_BT = torch.ones(len(rewards), 2, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return RewardBatch(torch.tensor(rewards, dtype=dtype), torch.tensor(groups), mask_BT)


def random_batch(seed: int, dtype: torch.dtype = torch.float64) -> RewardBatch:
    random = np.random.default_rng(seed)
    rewards = random.normal(size=20)
    rewards[random.random(20) < 0.15] = NAN
    groups = np.sort(random.integers(0, 6, 20))
    groups = np.unique(groups, return_inverse=True)[1]
    mask = random.random((20, 7)) < 0.7
    return RewardBatch(torch.tensor(rewards, dtype=dtype), torch.tensor(groups), torch.tensor(mask))


def by_group(values: RewardBatch, formula) -> np.ndarray:
    """`formula(scored rewards of a group)` for each group of more than one scored response whose rewards differ; else 0."""
    rewards, groups = values.rewards_B.numpy(), values.groups_B.numpy()
    result = np.zeros(len(rewards))
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & np.isfinite(rewards))
        if len(members) > 1 and rewards[members].max() > rewards[members].min():
            result[members] = formula(rewards[members])
    return result


def whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    chosen = values[mask]
    return np.where(mask, (values - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8), 0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("entry", "formula"),
    [
        (Grpo(), lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6)),
        (Grpo(normalize_std=False), lambda r: r - r.mean()),
        (Rloo(), lambda r: r - (r.sum() - r) / (len(r) - 1)),
    ],
)
def test_group_relative_estimators_match_their_formulas(entry, formula, seed):
    values = random_batch(seed)
    advantages, mask = estimate(entry, values)
    expected = np.where(mask.numpy(), by_group(values, formula)[:, None], 0)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_pp_matches_its_recursion(gamma, seed):
    values = random_batch(seed)
    advantages, mask = estimate(ReinforcePp(gamma=gamma), values)
    returns = np.zeros(mask.shape)
    for row, reward in enumerate(values.rewards_B.numpy()):
        positions = np.flatnonzero(mask[row].numpy())
        running = 0.0
        for position in positions[::-1]:
            running = (reward if position == positions[-1] else 0.0) + gamma * running
            returns[row, position] = running
    np.testing.assert_allclose(advantages.numpy(), whitened(returns, mask.numpy()), atol=1e-12)


def test_grpo_by_hand():
    advantages, _ = estimate(Grpo(), batch([0.0, 1.0, 1.0, 0.0, 5.0, 7.0], [0, 0, 0, 0, 1, 1]))
    high = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    pair = 1 / (np.sqrt(2) + 1e-6)
    assert advantages[:, 0].tolist() == pytest.approx([-high, high, high, -high, -pair, pair])


def test_rloo_by_hand():
    advantages, _ = estimate(Rloo(), batch([1.0, 2.0, 6.0], [0, 0, 0]))
    assert advantages[:, 0].tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


@pytest.mark.parametrize("entry", [Grpo(), Grpo(normalize_std=False), Rloo()])
@pytest.mark.parametrize("rewards", [[0.3] * 8, [0.1] * 3, [1 / 3] * 7])
def test_equal_rewards_give_exactly_zero_in_float32(entry, rewards):
    advantages, _ = estimate(entry, batch(rewards, [0] * len(rewards), dtype=torch.float32))
    assert torch.count_nonzero(advantages) == 0


@pytest.mark.parametrize("entry", [Grpo(), Rloo()])
def test_a_group_of_one_has_advantage_zero(entry):
    advantages, mask = estimate(entry, batch([3.0, 1.0, 2.0], [0, 1, 1]))
    assert advantages[0].tolist() == [0.0, 0.0]
    assert mask[0].all()


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_missing_reward_is_outside_the_statistics_and_leaves_the_mask(entry):
    advantages, mask = estimate(entry, batch([1.0, NAN, 2.0, 5.0], [0, 0, 0, 0]))
    without, _ = estimate(entry, batch([1.0, 2.0, 5.0], [0, 0, 0]))
    np.testing.assert_allclose(advantages[[0, 2, 3]], without)
    assert advantages[1].tolist() == [0.0, 0.0]
    assert mask.tolist() == [[True, True], [False, False], [True, True], [True, True]]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_response_without_a_trainable_token_keeps_its_reward_in_the_group(entry):
    advantages, mask = estimate(entry, batch([1.0, 2.0, 5.0], [0, 0, 0], [[True, True], [False, False], [True, False]]))
    assert torch.isfinite(advantages).all()
    assert not mask[1].any()
    if entry.name != "reinforce_pp":
        whole, _ = estimate(entry, batch([1.0, 2.0, 5.0], [0, 0, 0]))
        assert advantages[2, 0] == whole[2, 0]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_nothing_scored_and_nothing_at_all_are_ordinary_inputs(entry):
    advantages, mask = estimate(entry, batch([NAN, NAN], [0, 0]))
    assert torch.count_nonzero(advantages) == 0
    assert not mask.any()
    empty = RewardBatch(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.bool))
    assert estimate(entry, empty)[0].shape == (0, 3)


def test_a_single_trainable_token_whitens_to_zero():
    advantages, _ = estimate(ReinforcePp(), batch([4.0], [0], [[True, False]]))
    assert advantages.tolist() == [[0.0, 0.0]]
