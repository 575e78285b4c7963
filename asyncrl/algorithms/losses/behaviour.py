"""Losses whose ratio is against the behaviour policy, and those that have none."""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses.inputs import LossInputs, MiniBatch, TokenLoss
from asyncrl.algorithms.masking import clamped_log_ratio, masked
from asyncrl.config.entries import DppoKl, DppoTv, Dro, GpgLoss, M2po, Reinforce


def reinforce(entry: Reinforce | GpgLoss, inputs: LossInputs) -> TokenLoss:
    """−A·lp, with w = sg exp(lp − lp_behave) where there is a correction.

    REINFORCE, Williams 1992 section 5; GPG, arXiv 2504.02546.
    """
    return TokenLoss(-inputs.A * inputs.lp)


def dppo_tv(entry: DppoTv, inputs: LossInputs) -> TokenLoss:
    """−A·sg(min(r, cap))·lp where p − p_b ≤ δ (A > 0) or p − p_b ≥ −δ (A < 0), else 0; r and p_b against the behaviour policy.

    DPPO, arXiv 2602.04879, binary total variation.
    """
    moved_BT = inputs.lp.detach().exp() - masked(inputs.behaviour_BT, inputs.mask_BT).exp()
    inside_BT = torch.where(inputs.A > 0, moved_BT <= entry.delta, moved_BT >= -entry.delta)
    return _within_trust_region(entry, inputs, inside_BT)


def dppo_kl(entry: DppoKl, inputs: LossInputs) -> TokenLoss:
    """−A·sg(min(r, cap))·lp where p_b log(p_b/p) + (1 − p_b) log((1 − p_b)/(1 − p)) ≤ δ, or the update moves p back towards p_b
    (A > 0 and p ≤ p_b, or A < 0 and p ≥ p_b), else 0; r and p_b against the behaviour policy.

    DPPO, arXiv 2602.04879, binary KL divergence.
    """
    lp_BT, behaviour_BT = inputs.lp.detach(), masked(inputs.behaviour_BT, inputs.mask_BT)
    other_BT, other_behaviour_BT = -torch.expm1(lp_BT), -torch.expm1(behaviour_BT)
    # p_b = 1 has no other event: 0·log 0 is 0
    others_BT = masked(other_behaviour_BT * (other_behaviour_BT.log() - other_BT.log()), other_behaviour_BT > 0)
    divergence_BT = behaviour_BT.exp() * (behaviour_BT - lp_BT) + others_BT
    back_BT = torch.where(inputs.A > 0, lp_BT <= behaviour_BT, lp_BT >= behaviour_BT)
    return _within_trust_region(entry, inputs, (divergence_BT <= entry.delta) | back_BT)


def dro(entry: Dro, inputs: LossInputs) -> TokenLoss:
    """−(A·lp − β/2·(log r)²), log r against the behaviour policy.

    DRO, arXiv 2405.19107, with the advantage in the place of reward less value.
    """
    return TokenLoss(-(inputs.A * inputs.lp - entry.beta / 2 * inputs.behaviour_log_ratio.square()))


def m2po(entry: M2po, inputs: LossInputs) -> TokenLoss:
    """−A·r, r against the behaviour policy, on the tokens that `m2po_selection` keeps; the denominator counts all of them.

    M2PO, arXiv 2510.01161 eq. 5.
    """
    value_BT = -inputs.A * inputs.behaviour_log_ratio.exp()
    return TokenLoss(masked(value_BT, inputs.selected), {"removed": ~inputs.selected})


def m2po_selection(entry: M2po, batch: MiniBatch) -> torch.Tensor:
    """bool[B, T], the tokens that stay: those of largest (log w)² are removed until the mean over the rest is < τ; one stays.

    w = π_prox/π_behave. Equal ones go in the order of their position in the batch. arXiv 2510.01161 eq. 4 and algorithm 1, over
    all tokens.
    """
    log_weight_BT = clamped_log_ratio(batch.proximal_BT, batch.behaviour_BT, batch.mask_BT)
    squares_N, order_N = log_weight_BT[batch.mask_BT].double().square().sort(stable=True)
    counts_N = torch.arange(1, len(squares_N) + 1, device=squares_N.device)
    small_N = squares_N.cumsum(0) / counts_N < entry.tau  # of ascending squares the mean only grows: a prefix is small
    small_N[:1] = True
    kept_N = torch.zeros_like(small_N)
    kept_N[order_N[small_N]] = True
    return torch.zeros_like(batch.mask_BT).masked_scatter(batch.mask_BT, kept_N)


def _within_trust_region(entry: DppoTv | DppoKl, inputs: LossInputs, inside_BT: torch.Tensor) -> TokenLoss:
    ratio_BT = inputs.behaviour_log_ratio.detach().exp().clamp(max=entry.cap)
    return TokenLoss(masked(-inputs.A * ratio_BT * inputs.lp, inside_BT), {"outside": ~inside_BT})
