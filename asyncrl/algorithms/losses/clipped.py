"""Losses on each token's ratio r = exp(lp − lp_prox), bounded by a clip, a cap or a gate."""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses.inputs import LossInputs, TokenLoss
from asyncrl.config.entries import Cispo, ClipCov, PpoClip, Sapo


def ppo_clip(entry: PpoClip | ClipCov, inputs: LossInputs) -> TokenLoss:
    """max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high)); for A < 0 at most −A·dual_clip.

    PPO, arXiv 1707.06347 eq. 7; dual clip, arXiv 1912.09729 eq. 5; two bounds, DAPO, arXiv 2503.14476 eq. 8.
    """
    advantages_BT, ratio_BT = inputs.A, inputs.log_ratio.exp()
    free_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - entry.clip_low, 1 + entry.clip_high)
    value_BT = torch.maximum(free_BT, clipped_BT)
    flags = _clip_flags(free_BT, clipped_BT, advantages_BT)
    if entry.dual_clip is not None:
        bound_BT = -advantages_BT * entry.dual_clip
        flags["dual_clipped"] = (advantages_BT < 0) & (bound_BT < value_BT)
        value_BT = torch.where(advantages_BT < 0, torch.minimum(value_BT, bound_BT), value_BT)
    return TokenLoss(value_BT, flags)


def cispo(entry: Cispo, inputs: LossInputs) -> TokenLoss:
    """−sg(min(r, cap))·A·lp; with `low`, sg(clip(r, low, cap)).

    CISPO of MiniMax-M1, arXiv 2506.13585 eq. 4 and 5.
    """
    ratio_BT = inputs.log_ratio.detach().exp()
    bounded_BT = ratio_BT.clamp(min=entry.low, max=entry.cap)
    flags = {"capped": ratio_BT > entry.cap}
    if entry.low is not None:
        flags["raised"] = ratio_BT < entry.low
    return TokenLoss(-bounded_BT * inputs.A * inputs.lp, flags)


def sapo(entry: Sapo, inputs: LossInputs) -> TokenLoss:
    """−A·σ(τ(r − 1))·4/τ; τ = `tau` for A > 0, `tau_negative` otherwise.

    SAPO, arXiv 2511.20347 eq. 5 and 6.
    """
    advantages_BT, ratio_BT = inputs.A, inputs.log_ratio.exp()
    tau_BT = torch.full_like(ratio_BT, entry.tau_negative).masked_fill(advantages_BT > 0, entry.tau)
    return TokenLoss(-advantages_BT * torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT)


def _clip_flags(free_BT: torch.Tensor, clipped_BT: torch.Tensor, advantages_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    active_BT = clipped_BT > free_BT
    return {"clipped_high": active_BT & (advantages_BT > 0), "clipped_low": active_BT & (advantages_BT < 0)}
