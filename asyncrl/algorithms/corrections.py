"""Importance corrections: the weight of a token that another policy sampled. w = sg exp(lp_prox − lp_behave).

Weights carry no gradient. Weighting leaves the mask as it is; only presets that drop may narrow it.
Sources: truncated importance sampling, Ionides 2008; its use between sampler and trainer, fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl.algorithms.masking import clamped_log_ratio
from asyncrl.config.entries import Entry, NoCorrection, StalenessTis, TokenTis


@dataclass(frozen=True)
class CorrectionInputs:
    """ratio_BT: w before any treatment, 1 outside the mask; staleness_BT int64 ≥ 0; mask_BT bool."""

    ratio_BT: torch.Tensor
    staleness_BT: torch.Tensor
    mask_BT: torch.Tensor


@dataclass(frozen=True)
class Corrected:
    """weights_BT ≥ 0; mask_BT, narrower than the input's only for presets that drop; flags: what befell each token
    ("truncated", …)."""

    weights_BT: torch.Tensor
    mask_BT: torch.Tensor
    flags: Mapping[str, torch.Tensor] = field(default_factory=dict)


def importance_ratio(proximal_BT: torch.Tensor, behaviour_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """w = sg exp(clamp(lp_prox − lp_behave, ±20)); 1 outside the mask."""
    return clamped_log_ratio(proximal_BT.detach(), behaviour_BT.detach(), mask_BT).exp()


def correct(entry: Entry, inputs: CorrectionInputs) -> Corrected:
    """Apply the entry's preset."""
    return CORRECTIONS[entry.name](entry, inputs)  # type: ignore[attr-defined]


def none(entry: NoCorrection, inputs: CorrectionInputs) -> Corrected:
    """No weight and no mask."""
    return Corrected(torch.ones_like(inputs.ratio_BT), inputs.mask_BT)


def token_tis(entry: TokenTis, inputs: CorrectionInputs) -> Corrected:
    """min(w, c) per token."""
    truncated_BT = (inputs.ratio_BT > entry.cap) & inputs.mask_BT
    return Corrected(inputs.ratio_BT.clamp(max=entry.cap), inputs.mask_BT, {"truncated": truncated_BT})


def staleness_tis(entry: StalenessTis, inputs: CorrectionInputs) -> Corrected:
    """min(w, c(d)) per token, c(d) = 1 + (c − 1)·decay^d, d the token's staleness."""
    decay = torch.as_tensor(entry.decay, dtype=inputs.ratio_BT.dtype, device=inputs.ratio_BT.device)
    cap_BT = 1 + (entry.cap - 1) * decay.pow(inputs.staleness_BT)
    truncated_BT = (inputs.ratio_BT > cap_BT) & inputs.mask_BT
    return Corrected(torch.minimum(inputs.ratio_BT, cap_BT), inputs.mask_BT, {"truncated": truncated_BT})


CORRECTIONS: dict[str, Callable[[Any, CorrectionInputs], Corrected]] = {
    "none": none,
    "token_tis": token_tis,
    "staleness_tis": staleness_tis,
}
"""Name of the entry to its function."""
