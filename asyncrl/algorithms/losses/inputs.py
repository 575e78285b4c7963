"""What a policy loss is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from asyncrl.algorithms.masking import clamped_log_ratio, masked


@dataclass(frozen=True)
class LossInputs:
    """All [B, T], a row a whole response. log_probs: the current policy's, with gradient; proximal, behaviour, advantages,
    weights: without; mask bool. selected bool: what `select` chose of the whole mini-batch, for the losses that need it."""

    log_probs_BT: torch.Tensor
    proximal_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    advantages_BT: torch.Tensor
    weights_BT: torch.Tensor
    mask_BT: torch.Tensor
    selected_BT: torch.Tensor | None = None

    @property
    def A(self) -> torch.Tensor:
        """Advantages, 0 outside the mask."""
        return masked(self.advantages_BT, self.mask_BT)

    @property
    def lp(self) -> torch.Tensor:
        """The current policy's log-probs, with gradient; 0 outside the mask."""
        return masked(self.log_probs_BT, self.mask_BT)

    @property
    def log_ratio(self) -> torch.Tensor:
        """lp − lp_prox, clamped, with gradient; 0 outside the mask."""
        return clamped_log_ratio(self.log_probs_BT, self.proximal_BT, self.mask_BT)

    @property
    def behaviour_log_ratio(self) -> torch.Tensor:
        """lp − lp_behave, clamped, with gradient; 0 outside the mask."""
        return clamped_log_ratio(self.log_probs_BT, self.behaviour_BT, self.mask_BT)

    @property
    def selected(self) -> torch.Tensor:
        assert self.selected_BT is not None, "this loss takes what `select` chose of the whole mini-batch"
        return self.selected_BT & self.mask_BT


@dataclass(frozen=True)
class TokenLoss:
    """values_BT: the loss of each token, 0 outside the mask; flags: what befell each token ("clipped_high", …), bool, to be
    reported as shares."""

    values_BT: torch.Tensor
    flags: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MiniBatch:
    """What is known of a whole mini-batch, all ranks together, before its first backward pass. [B, T]: lp_prox, lp_behave,
    advantages, mask bool; sample_ids_B int64, one for each response, None where the caller has none."""

    proximal_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    sample_ids_B: torch.Tensor | None = None
