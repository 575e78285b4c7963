"""A world small enough to enumerate (vocabulary 4, length 3, all 64 sequences): what a correction's weights make of the policy
gradient, without sampling noise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from asyncrl.algorithms import correction, policy_loss

VOCABULARY, LENGTH = 4, 3
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
PREFIXES = {prefix: row for row, prefix in enumerate(
    prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=length)
)}  # fmt: skip
ROWS = torch.tensor([[PREFIXES[tuple(sequence[:t])] for t in range(LENGTH)] for sequence in SEQUENCES.tolist()])
REWARDS = torch.tensor(np.random.default_rng(1).normal(size=len(SEQUENCES)))
MASK = torch.ones(SEQUENCES.shape)


def logits(seed: int, scale: float = 0.7) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(scale=scale, size=(len(PREFIXES), VOCABULARY)))


def log_probs(table: torch.Tensor) -> torch.Tensor:
    """[64, 3]"""
    return table.log_softmax(-1)[ROWS].gather(2, SEQUENCES[..., None])[..., 0]


def on_policy_gradient(table: torch.Tensor) -> torch.Tensor:
    """Of the expected reward itself, Σ π(y) R(y)."""
    table = table.clone().requires_grad_()
    (log_probs(table).sum(1).exp() * REWARDS).sum().backward()
    return table.grad


def corrected_gradient(current: torch.Tensor, behaviour: torch.Tensor, config: object) -> torch.Tensor:
    """What REINFORCE ascends, in expectation over the behaviour policy's sequences."""
    table = current.clone().requires_grad_()
    current_BT, behaviour_BT = log_probs(table), log_probs(behaviour)
    weights, mask, _ = correction(config, proximal_log_probs=current_BT, behaviour_log_probs=behaviour_BT, mask=MASK)
    share = behaviour_BT.sum(1).exp()
    loss, _ = policy_loss(
        "reinforce", log_probs=current_BT, old_log_probs=current_BT, behaviour_log_probs=behaviour_BT, weights=weights,
        advantages=REWARDS * share, mask=mask, aggregation="token_sum",
    )  # fmt: skip
    (-loss).backward()
    return table.grad


def bias(config: object) -> float:
    """Relative distance of the expected gradient from the on-policy one."""
    exact = on_policy_gradient(logits(2))
    return float((corrected_gradient(logits(2), logits(3), config) - exact).norm() / exact.norm())


@pytest.mark.parametrize("seed", range(5))
def test_untruncated_sequence_weights_give_the_on_policy_gradient(seed):
    whole = {"name": "general", "level": "sequence", "cap": 1e12}
    found = corrected_gradient(logits(seed), logits(seed + 100), whole)
    torch.testing.assert_close(found, on_policy_gradient(logits(seed)), atol=1e-6, rtol=0)


def test_on_policy_every_correction_gives_the_on_policy_gradient():
    for config in ("none", "token_tis", "seq_tis", "token_icepop", "seq_mis", "geo_mis", "k3_mask", "veto"):
        found = corrected_gradient(logits(4), logits(4), config)
        torch.testing.assert_close(found, on_policy_gradient(logits(4)), atol=1e-12, rtol=0)


def test_a_bound_on_the_weight_costs_bias_and_the_tighter_the_more():
    biases = [bias({"name": "seq_tis", "cap": cap}) for cap in (1e6, 8.0, 2.0, 1.0)]
    assert biases[0] < 1e-6
    assert biases == sorted(biases)
    assert bias("seq_tis") < bias("token_tis") < bias("none")
