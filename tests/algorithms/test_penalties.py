"""A penalty per token, as algorithm.kl takes it from the reward: where each estimator counts it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import ADVANTAGES, RewardBatch, estimate
from asyncrl.config.entries import Advantage, Gae, Grpo, ReinforcePp, entries_of
from tests.algorithms import reference_advantages as reference
from tests.algorithms.batches import Batch, random_batch, tensor

AT_ITS_TOKEN = ("gae", "reinforce_pp")
SUMMED = [name for name in ADVANTAGES if name not in (*AT_ITS_TOKEN, "gdpo", "distillation")]


def given(batch: Batch) -> RewardBatch:
    return RewardBatch(
        tensor(batch.rewards),
        torch.unique(tensor(batch.groups), return_inverse=True)[1],
        tensor(batch.mask),
        greedy_B=tensor(batch.greedy),
        values_BT=tensor(batch.values),
        log_probs_BT=tensor(batch.log_probs),
        sum_pi_squared_BT=tensor(batch.sum_pi_squared),
    )


def penalties(batch: Batch, outside: float = np.nan) -> np.ndarray:
    """Of each token, above and below 0; `outside` where nothing trains."""
    return np.where(batch.mask, batch.advantages / 10, outside)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SUMMED)
def test_an_estimator_of_whole_responses_has_it_summed_in_the_reward(name, seed):
    batch, entry = random_batch(seed), entries_of(Advantage)[name]()
    lowered = batch.rewards - penalties(batch, 0.0).sum(1)
    found, mask = estimate(entry, replace(given(batch), penalty_BT=tensor(penalties(batch))))
    expected, same = estimate(entry, replace(given(batch), rewards_B=tensor(lowered)))
    assert torch.equal(mask, same)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert not torch.allclose(found, estimate(entry, given(batch))[0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_pp_has_it_at_its_token(gamma, seed):
    batch = random_batch(seed)
    found, mask = estimate(ReinforcePp(gamma=gamma), replace(given(batch), penalty_BT=tensor(penalties(batch))))
    kept, returns = mask.numpy(), np.zeros(mask.shape)
    for row, positions in enumerate(kept):
        following = 0.0
        for place in reversed(np.flatnonzero(positions)):
            last = place == np.flatnonzero(positions)[-1]
            following = gamma * following - penalties(batch)[row, place] + (batch.rewards[row] if last else 0.0)
            returns[row, place] = following
    np.testing.assert_allclose(found, reference.whiten(returns, kept), atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_gae_has_it_at_its_token(seed):
    batch = random_batch(seed)
    found, mask = estimate(Gae(gamma=0.9, lam=0.7), replace(given(batch), penalty_BT=tensor(penalties(batch))))
    rewards = -penalties(batch, 0.0)
    for row, positions in enumerate(mask.numpy()):
        if positions.any():
            rewards[row, np.flatnonzero(positions)[-1]] += batch.rewards[row]
    np.testing.assert_allclose(found, reference.gae(rewards, batch.values, mask.numpy(), 0.9, 0.7)[0], atol=1e-10)


def test_every_estimator_says_where_it_has_it():
    at_its_token = {name for name, cls in entries_of(Advantage).items() if cls().needs.token_rewards}
    assert at_its_token == set(AT_ITS_TOKEN)


def test_equal_rewards_differ_by_what_they_cost_and_not_where_they_cost_the_same():
    equal = RewardBatch(torch.full((4,), 0.3), torch.tensor([0, 0, 1, 1]), torch.ones(4, 2, dtype=torch.bool))
    penalty = torch.tensor([[0.1, 0.1], [0.0, 0.0], [0.1, 0.0], [0.0, 0.1]])
    advantages, _ = estimate(Grpo(normalize_std=False), replace(equal, penalty_BT=penalty))
    assert advantages[:, 0].tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])
