"""Policy losses, per token. A advantage; r = exp(lp − lp_prox); w the correction weight, multiplied in unless a loss says
otherwise.

Sources: PPO, arXiv 1707.06347 eq. 7; dual clip, arXiv 1912.09729 eq. 5; asymmetric bounds, DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl.algorithms.masking import clamped_log_ratio, masked
from asyncrl.config.entries import Entry, PpoClip


@dataclass(frozen=True)
class LossInputs:
    """All [B, T]. log_probs: the current policy's, with gradient; proximal, behaviour, advantages, weights: without; mask
    bool."""

    log_probs_BT: torch.Tensor
    proximal_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    advantages_BT: torch.Tensor
    weights_BT: torch.Tensor
    mask_BT: torch.Tensor


@dataclass(frozen=True)
class TokenLoss:
    """values_BT: the loss of each token, 0 outside the mask; flags: what befell each token ("clipped_high", …), bool, to be
    reported as shares."""

    values_BT: torch.Tensor
    flags: Mapping[str, torch.Tensor] = field(default_factory=dict)


def token_loss(entry: Entry, inputs: LossInputs) -> TokenLoss:
    """Apply the entry's loss; whatever stands outside the mask has neither value nor gradient."""
    loss = LOSSES[entry.name](entry, inputs)  # type: ignore[attr-defined]
    flags = {name: flag & inputs.mask_BT for name, flag in loss.flags.items()}
    return TokenLoss(masked(loss.values_BT, inputs.mask_BT), flags)


def ppo_clip(entry: PpoClip, inputs: LossInputs) -> TokenLoss:
    """max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high)); for A < 0 at most −A·dual_clip."""
    advantages_BT = masked(inputs.advantages_BT, inputs.mask_BT)
    weights_BT = masked(inputs.weights_BT, inputs.mask_BT)
    ratio_BT = clamped_log_ratio(inputs.log_probs_BT, inputs.proximal_BT, inputs.mask_BT).exp()
    free_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - entry.clip_low, 1 + entry.clip_high)
    value_BT = torch.maximum(free_BT, clipped_BT)
    active_BT = clipped_BT > free_BT
    flags = {"clipped_high": active_BT & (advantages_BT > 0), "clipped_low": active_BT & (advantages_BT < 0)}
    if entry.dual_clip is not None:
        bound_BT = -advantages_BT * entry.dual_clip
        flags["dual_clipped"] = (advantages_BT < 0) & (bound_BT < value_BT)
        value_BT = torch.where(advantages_BT < 0, torch.minimum(value_BT, bound_BT), value_BT)
    return TokenLoss(value_BT * weights_BT, flags)


LOSSES: dict[str, Callable[[Any, LossInputs], TokenLoss]] = {
    "ppo_clip": ppo_clip,
}
"""Name of the entry to its function."""
