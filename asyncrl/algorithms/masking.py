"""Arithmetic under a mask: by `torch.where`, never by multiplication, so that NaN and inf where the mask is False change
nothing."""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios, and sums of them, are clamped to plus and minus this."""


def masked(values: torch.Tensor, mask: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """`values` where `mask` is True, `fill` elsewhere; no gradient flows to what is masked."""
    return torch.where(mask, values, torch.full((), fill, dtype=values.dtype, device=values.device))


def clamped_log_ratio(log_probs: torch.Tensor, anchor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log(π/π_anchor) per token, clamped to ±20; 0 where the mask is False."""
    difference = masked(log_probs, mask) - masked(anchor, mask)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(x − mean)/sqrt(var + 1e-8) over the True positions, var with ddof 1; 0 elsewhere. A single position gives 0."""
    count = mask.sum()
    if count < 2:
        return torch.zeros_like(values)
    clean = masked(values, mask)
    mean = clean.sum() / count
    centred = masked(clean - mean, mask)
    variance = centred.square().sum() / (count - 1)
    return centred / (variance + 1e-8).sqrt()
