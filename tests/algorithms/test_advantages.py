"""Every advantage against its formula in numpy, and the edge cases of the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import advantage, gae
from asyncrl.algorithms.advantages import ADVANTAGES, RewardBatch, estimate
from asyncrl.config.entries import Gae, Grpo, ReinforcePp
from tests.algorithms import reference_advantages as reference
from tests.algorithms.batches import DTYPES, TOLERANCE, random_batch, tensor

NAN = float("nan")
CASES = [
    ("grpo", {}),
    ("grpo", {"normalize_std": False}),
    ("rloo", {}),
    ("reinforce_pp", {}),
    ("reinforce_pp", {"gamma": 0.9}),
    ("reinforce_pp", {"gamma": 0.0}),
    ("reinforce_pp_baseline", {}),
    ("remax", {}),
    ("opo", {}),
    ("gpg", {}),
    ("gpg", {"f_norm": 2.5}),
    ("grpo_passk", {}),
    ("grpo_passk", {"normalize_std": False}),
    ("gdpo", {}),
    ("optimal_token_baseline", {}),
    ("tir_optimal_token_baseline", {}),
    ("distillation", {}),
    ("distillation", {"coefficient": 0.3, "reward_coefficient": 2.0}),
]
NAMES = sorted({name for name, _ in CASES})
BY_GROUP = ["grpo", "rloo", "opo", "gpg", "grpo_passk"]
WEIGHTS = [0.7, 0.3]


def found(name, batch, dtype=torch.float64, **params):
    """The public call on a batch."""
    return advantage(
        name,
        rewards=tensor(batch.rewards, dtype),
        mask=tensor(batch.mask),
        group_ids=tensor(batch.groups),
        reward_components=tensor(batch.components, dtype),
        component_weights=torch.tensor(WEIGHTS),
        greedy_rewards=tensor(batch.greedy, dtype),
        log_probs=tensor(batch.log_probs, dtype),
        sum_pi_squared=tensor(batch.sum_pi_squared, dtype),
        teacher_log_probs=tensor(batch.proximal, dtype),
        behaviour_log_probs=tensor(batch.behaviour, dtype),
        **params,
    )


def expected(name, batch, **params):
    return getattr(reference, name)(
        batch.rewards,
        batch.groups,
        batch.mask,
        reward_components=batch.components,
        component_weights=np.array(WEIGHTS, dtype=np.float32).astype(float),
        greedy_rewards=batch.greedy,
        log_probs=batch.log_probs,
        sum_pi_squared=batch.sum_pi_squared,
        teacher_log_probs=batch.proximal,
        behaviour_log_probs=batch.behaviour,
        **params,
    )


def plain(rewards, groups=None, mask=None, dtype=torch.float64, name="grpo", **params):
    groups = [0] * len(rewards) if groups is None else groups
    mask = torch.ones(len(rewards), 2) if mask is None else torch.tensor(mask)
    return advantage(name, rewards=torch.tensor(rewards, dtype=dtype), mask=mask, group_ids=torch.tensor(groups), **params)


def test_every_estimator_is_held_against_its_formula():
    assert set(NAMES) | {"gae"} == set(ADVANTAGES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_an_advantage_equals_its_formula(name, params, seed, dtype):
    batch = random_batch(seed).at(dtype)
    result = found(name, batch, dtype, **params)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.double().numpy(), expected(name, batch, **params), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 0.5)])
def test_gae_equals_its_formula(gamma, lam, seed, dtype):
    batch = random_batch(seed).at(dtype)
    rewards = tensor(batch.poisoned(NAN).advantages, dtype)
    advantages, returns = gae(rewards, tensor(batch.poisoned(np.inf).values, dtype), tensor(batch.mask), gamma=gamma, lam=lam)
    whitened, plain_returns = reference.gae(batch.advantages, batch.values, batch.mask, gamma, lam)
    np.testing.assert_allclose(advantages.double().numpy(), whitened, **TOLERANCE[dtype])
    np.testing.assert_allclose(returns.double().numpy(), plain_returns, **TOLERANCE[dtype])


def test_the_trainer_s_gae_has_the_reward_on_the_last_trainable_token():
    batch = random_batch(3)
    given_batch = RewardBatch(
        tensor(batch.rewards), torch.unique(tensor(batch.groups), return_inverse=True)[1], tensor(batch.mask),
        values_BT=tensor(batch.values),
    )  # fmt: skip
    advantages, mask = estimate(Gae(gamma=0.9, lam=0.7), given_batch)
    rewards = np.zeros(batch.mask.shape)
    for row, positions in enumerate(mask.numpy()):
        if positions.any():
            rewards[row, np.flatnonzero(positions)[-1]] = batch.rewards[row]
    np.testing.assert_allclose(advantages, reference.gae(rewards, batch.values, mask.numpy(), 0.9, 0.7)[0], atol=1e-12)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), shuffle=st.randoms(use_true_random=False), name=st.sampled_from(NAMES))
def test_the_order_of_responses_does_not_matter(seed, shuffle, name):
    batch = random_batch(seed)
    order = list(range(len(batch.rewards)))
    shuffle.shuffle(order)
    np.testing.assert_allclose(found(name, batch.rows(order)), found(name, batch)[order], atol=1e-10)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(NAMES), poison=st.sampled_from([NAN, np.inf, -np.inf, 1e300]))
def test_masked_positions_change_nothing(seed, name, poison):
    batch = random_batch(seed)
    assert torch.equal(found(name, batch.poisoned(poison)), found(name, batch))


def test_grpo_by_hand():
    advantages = plain([0.0, 1.0, 1.0, 0.0, 5.0, 7.0], [0, 0, 0, 0, 1, 1])
    high = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    pair = 1 / (np.sqrt(2) + 1e-6)
    assert advantages[:, 0].tolist() == pytest.approx([-high, high, high, -high, -pair, pair])


def test_the_others_by_hand():
    assert plain([1.0, 2.0, 6.0], name="rloo")[:, 0].tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])
    assert plain([1.0, 4.0], name="opo", mask=[[1, 1, 1], [1, 0, 0]])[:, 0].tolist() == pytest.approx([1 - 7 / 4, 4 - 7 / 4])
    assert plain([1.0, 3.0, 2.0, 2.0], [0, 0, 1, 1], name="gpg")[:, 0].tolist() == pytest.approx([-2.0, 2.0, 0.0, 0.0])
    best = plain([1.0, 5.0, 2.0], name="grpo_passk", normalize_std=False)
    assert best[:, 0].tolist() == [0.0, 3.0, 0.0]
    assert plain([1.0, 5.0, 5.0], name="grpo_passk").count_nonzero() == 0, "a tie"
    assert plain([1.0, 2.0], name="remax", greedy_rewards=torch.tensor([0.5, 3.0]))[:, 0].tolist() == [0.5, -1.0]


def test_distillation_by_hand():
    known = {
        "teacher_log_probs": torch.tensor([[-1.0, -2.0], [-math.inf, -1.0]], dtype=torch.float64),
        "behaviour_log_probs": torch.tensor([[-1.5, -1.0], [-1.0, -1.0]], dtype=torch.float64),
    }
    assert plain([1.0, 0.0], name="distillation", **known).tolist() == [[0.5, -1.0], [-20.0, 0.0]]
    both = plain([1.0, 0.0], name="distillation", coefficient=2.0, reward_coefficient=0.5, **known)
    assert both.tolist() == [[1.5, -1.5], [-40.0, 0.0]]


def test_the_token_baseline_by_hand():
    """Two members; π = 1/2 and Σπ² = 1/2 make each token weigh 1/2, so that W = 1/2, 1 and the baseline is the mean."""
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    known = {"log_probs": half.log(), "sum_pi_squared": half}
    both = plain([1.0, 3.0], name="optimal_token_baseline", **known)
    np.testing.assert_allclose(both, [[-1.0, -1.0], [1.0, 1.0]], atol=1e-7)
    left_alone = plain([1.0, 3.0], name="optimal_token_baseline", mask=[[1, 1], [1, 0]], **known)
    np.testing.assert_allclose(left_alone, [[-1.0, 1.0], [1.0, 0.0]], atol=1e-7)


@pytest.mark.parametrize("name", BY_GROUP)
@pytest.mark.parametrize("rewards", [[0.3] * 8, [0.7] * 7, [0.1] * 3, [1 / 3] * 7])
def test_equal_rewards_give_exactly_zero_in_float32(name, rewards):
    assert torch.count_nonzero(plain(rewards, dtype=torch.float32, name=name)) == 0


@pytest.mark.parametrize("reward", [0.3, 0.7])
def test_equal_components_give_exactly_zero_in_float32(reward):
    components = torch.tensor([[reward, 0.1]] * 8)
    both = {"reward_components": components, "component_weights": torch.tensor([0.3, 0.7])}
    assert torch.count_nonzero(plain([reward] * 8, name="gdpo", dtype=torch.float32, **both)) == 0


def test_equal_rewards_are_zero_before_whitening():
    advantages = plain([0.3] * 7 + [0.0, 1.0], [0] * 7 + [1] * 2, dtype=torch.float32, name="reinforce_pp_baseline")
    assert torch.count_nonzero(advantages[:7]) == 0
    assert torch.count_nonzero(plain([0.7] * 7, dtype=torch.float32, name="reinforce_pp_baseline")) == 0


@pytest.mark.parametrize("name", [*BY_GROUP, "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_group_of_one_has_advantage_zero(name):
    batch = random_batch(0)
    alone = np.flatnonzero([np.sum(batch.groups == group) == 1 for group in batch.groups])
    assert len(alone)
    np.testing.assert_allclose(found(name, batch)[alone], 0.0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_reward_is_as_if_its_response_were_not_there(name):
    batch = random_batch(5)
    there = np.isfinite(batch.rewards) & np.isfinite(batch.components).all(1)
    result = found(name, batch)
    without = found(name, batch.rows(np.flatnonzero(np.isfinite(batch.rewards))))
    if name != "gdpo":
        np.testing.assert_allclose(result[np.isfinite(batch.rewards)], without, atol=1e-12)
    else:
        np.testing.assert_allclose(result[there], found(name, batch.rows(np.flatnonzero(there))), atol=1e-12)
    assert torch.count_nonzero(result[~np.isfinite(batch.rewards)]) == 0


@pytest.mark.parametrize("entry", [Grpo(), ReinforcePp()], ids=str)
def test_a_missing_reward_s_tokens_leave_the_mask(entry):
    values = RewardBatch(torch.tensor([1.0, NAN, 2.0]), torch.tensor([0, 0, 0]), torch.ones(3, 2, dtype=torch.bool))
    _, mask = estimate(entry, values)
    assert mask.tolist() == [[True, True], [False, False], [True, True]]


@pytest.mark.parametrize("name", BY_GROUP)
def test_a_response_without_a_trainable_token_keeps_its_reward_in_the_group(name):
    advantages = plain([1.0, 2.0, 5.0], mask=[[1, 1], [0, 0], [1, 0]], name=name)
    assert torch.isfinite(advantages).all()
    if name != "opo":  # whose mean goes by length
        assert advantages[2, 0] == plain([1.0, 2.0, 5.0], name=name)[2, 0]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_scored_and_no_token_are_ordinary_inputs(name):
    batch = random_batch(1)
    nothing = batch.rows([0, 1, 2])
    nothing.rewards[:] = NAN
    assert torch.count_nonzero(found(name, nothing)) == 0
    masked = batch.rows(np.arange(len(batch.rewards)))
    masked.mask[:] = False
    assert torch.count_nonzero(found(name, masked)) == 0
    empty = RewardBatch(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.bool))
    assert estimate(Grpo(), empty)[0].shape == (0, 3)


def test_a_single_trainable_token_whitens_to_zero():
    assert plain([4.0], mask=[[1, 0]], name="reinforce_pp").tolist() == [[0.0, 0.0]]
