"""The optimal token baseline: of every token, or of every turn, its own, weighted by how much the path so far varies."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.batch import RewardBatch, group_statistics
from asyncrl.algorithms.masking import masked
from asyncrl.config.entries import OptimalTokenBaseline, TirOptimalTokenBaseline


def optimal_token_baseline(entry: OptimalTokenBaseline, batch: RewardBatch) -> torch.Tensor:
    """A_t = G_t − Σ_i G_i,t W_i,t/(Σ_i W_i,t + 1e-8) over the members that still have trainable token t; W_t = Σ_{j≤t} m_j (1 −
    2π_j + Σπ_j²). Where only one member is left the baseline is 0; a group of one has advantage 0.

    Optimal token baseline, arXiv 2602.07078. G, the reward to go, is R on every trainable token: it comes with the last one.
    """
    rewards_BT = masked(batch.rewards_B, batch.rewards_B.isfinite()).double()[:, None].expand(batch.mask_BT.shape)
    baseline_BT = _baseline(rewards_BT, _variance_terms(batch).cumsum(1), batch.mask_BT, batch)
    return _without_groups_of_one(rewards_BT - baseline_BT, batch)


def tir_optimal_token_baseline(entry: TirOptimalTokenBaseline, batch: RewardBatch) -> torch.Tensor:
    """optimal_token_baseline with turns in the place of tokens: A_k = G_k − Σ_i G_i,k W_i,k/(Σ_i W_i,k + 1e-8) over the members
    that still have turn k, W_k up to the end of turn k. A turn is a run of trainable tokens between masked ones.

    Optimal token baseline for tool-integrated reasoning, arXiv 2602.07078.
    """
    before_BT = torch.nn.functional.pad(batch.mask_BT, (1, 0))[:, :-1]
    turn_BT = ((batch.mask_BT & ~before_BT).cumsum(1) - 1).clamp(min=0)  # a turn's index; there are at most as many as tokens
    mask_BK = torch.zeros_like(turn_BT).scatter_add(1, turn_BT, batch.mask_BT.long()) > 0
    terms_BT = _variance_terms(batch)
    variance_BK = torch.zeros_like(terms_BT).scatter_add(1, turn_BT, terms_BT).cumsum(1)
    rewards_BK = masked(batch.rewards_B, batch.rewards_B.isfinite()).double()[:, None].expand(batch.mask_BT.shape)
    baseline_BK = _baseline(rewards_BK, variance_BK, mask_BK, batch)
    return _without_groups_of_one(rewards_BK - baseline_BK.gather(1, turn_BT), batch)


def _variance_terms(batch: RewardBatch) -> torch.Tensor:
    """1 − 2π + Σπ² of each token, ‖e − π‖² of the sampled one's one-hot e; 0 outside the mask. W is their sum so far."""
    assert batch.log_probs_BT is not None
    assert batch.sum_pi_squared_BT is not None
    chosen_BT = masked(batch.log_probs_BT, batch.mask_BT).double().exp()
    term_BT = 1 - 2 * chosen_BT + masked(batch.sum_pi_squared_BT, batch.mask_BT).double()
    return masked(term_BT, batch.mask_BT)


def _baseline(rewards_BX: torch.Tensor, variance_BX: torch.Tensor, present_BX: torch.Tensor, batch: RewardBatch) -> torch.Tensor:
    """Per group and place x, over the scored members that are present there."""
    variance_BX = masked(variance_BX, present_BX)
    zeros_GX = torch.zeros(batch.num_groups, rewards_BX.shape[1], dtype=torch.float64, device=rewards_BX.device)
    members_GX = zeros_GX.index_add(0, batch.groups_B, present_BX.double())
    weighted_GX = zeros_GX.index_add(0, batch.groups_B, rewards_BX * variance_BX)
    baseline_GX = weighted_GX / (zeros_GX.index_add(0, batch.groups_B, variance_BX) + 1e-8)
    return masked(baseline_GX, members_GX > 1)[batch.groups_B]


def _without_groups_of_one(values_BT: torch.Tensor, batch: RewardBatch) -> torch.Tensor:
    count_B = group_statistics(batch.rewards_B, batch.groups_B).count_B
    return masked(values_BT, (count_B > 1)[:, None])
