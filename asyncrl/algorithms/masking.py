"""Arithmetic under a mask: by `torch.where`, never by multiplication, so that NaN and inf where the mask is False change
nothing."""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios, and sums of them, are clamped to plus and minus this."""


def masked(values: torch.Tensor, mask: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """`values` where `mask` is True, `fill` elsewhere; no gradient flows to what is masked."""
    return torch.where(mask, values, torch.full((), fill, dtype=values.dtype, device=values.device))


def bounded(log_ratios: torch.Tensor) -> torch.Tensor:
    """Log-ratios, or sums of them, clamped to ±20."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clamped_log_ratio(log_probs: torch.Tensor, anchor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log(π/π_anchor) per token, clamped to ±20; 0 where the mask is False."""
    return bounded(masked(log_probs, mask) - masked(anchor, mask))


def response_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """[B, 1]: mean of each response's True positions, 0 where it has none."""
    return masked(values_BT, mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(x − mean)/sqrt(var + 1e-8) over the True positions, var with ddof 1; 0 elsewhere. A single position gives 0.

    In float64, so that a mean far from 0 costs no digits; the result has the dtype of `values`.
    """
    count = mask.sum()
    if count < 2:
        return torch.zeros_like(values)
    clean = masked(values, mask).double()
    mean = clean.sum() / count
    centred = masked(clean - mean, mask)
    variance = centred.square().sum() / (count - 1)
    return (centred / (variance + 1e-8).sqrt()).to(values.dtype)
