"""Losses on the ratio of a whole response. Rows are whole responses, so a cut into micro-batches changes nothing."""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses.inputs import LossInputs, TokenLoss
from asyncrl.algorithms.masking import bounded, masked, response_mean
from asyncrl.config.entries import Gmpo, Gspo, Topr


def gspo(entry: Gspo, inputs: LossInputs) -> TokenLoss:
    """s = exp(mean_t (lp − lp_prox)); s_t = sg(s)·exp(lp − sg(lp)); max(−A s_t, −A clip(s_t, 1 − ε_low, 1 + ε_high)).

    GSPO, arXiv 2507.18071 eq. 5 and 7; its token form, eq. 13 and 14, whose gradient is GSPO's where a response has one A.
    """
    advantages_BT, lp_BT = inputs.A, inputs.lp
    ratio_B1 = response_mean(inputs.log_ratio.detach(), inputs.mask_BT).exp()
    ratio_BT = ratio_B1 * (lp_BT - lp_BT.detach()).exp()
    free_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - entry.clip_low, 1 + entry.clip_high)
    active_BT = clipped_BT > free_BT
    flags = {"clipped_high": active_BT & (advantages_BT > 0), "clipped_low": active_BT & (advantages_BT < 0)}
    return TokenLoss(torch.maximum(free_BT, clipped_BT), flags)


def gmpo(entry: Gmpo, inputs: LossInputs) -> TokenLoss:
    """−A·exp(mean_t ℓ), ℓ = sgn(A)·min(sgn(A)·log r, sgn(A)·clamp(log r, −clip_low, clip_high)); one A per response. Each token
    carries its response's value, so that the mean over tokens is that value. The weight is exp(mean_t log w).

    GMPO, arXiv 2507.20673, with the clip of each token in log space.
    """
    sign_BT, log_ratio_BT = inputs.A.sign(), inputs.log_ratio
    clipped_BT = sign_BT * log_ratio_BT.clamp(-entry.clip_low, entry.clip_high)
    bounded_BT = sign_BT * torch.minimum(sign_BT * log_ratio_BT, clipped_BT)
    value_BT = -inputs.A * response_mean(bounded_BT, inputs.mask_BT).exp()
    active_BT = clipped_BT < sign_BT * log_ratio_BT
    return TokenLoss(value_BT, {"clipped_high": active_BT & (sign_BT > 0), "clipped_low": active_BT & (sign_BT < 0)})


def geometric_weight(inputs: LossInputs) -> torch.Tensor:
    """[B, 1]: exp(mean_t log w), the geometric mean of a response's weights; 0 where any of them is."""
    return response_mean(masked(inputs.weights_BT, inputs.mask_BT, 1.0).log(), inputs.mask_BT).exp()


def topr(entry: Topr, inputs: LossInputs) -> TokenLoss:
    """A ≥ 0: −A·lp; A < 0: −A·sg(clip(Π r, 0, cap))·lp, r against the behaviour policy, Π over the response.

    TOPR, arXiv 2503.14286, with the taper [0, 1] of its canonical form.
    """
    advantages_BT = inputs.A
    product_B1 = bounded(inputs.behaviour_log_ratio.detach().sum(1, keepdim=True)).exp()
    negative_BT = advantages_BT < 0
    factor_BT = torch.where(negative_BT, product_B1.clamp(max=entry.cap), 1.0).to(advantages_BT.dtype)
    return TokenLoss(-advantages_BT * factor_BT * inputs.lp, {"capped": negative_BT & (product_B1 > entry.cap)})
