"""Sampling: one uniform number per (seed, position), turned into a token by the inverse of the cumulative distribution.

No generator state exists, so a sequence's tokens do not depend on its neighbours in the batch.
Shapes: N sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64[N] in [0, 1): SplitMix64 of the seed, advanced `position` steps (Steele, Lea, Flood 2014)."""
    mixed = _mix(_mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def sample(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    uniform_N: torch.Tensor,
    *,
    top_p_N: torch.Tensor | None = None,
    top_k_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64[N] and their log-probs float32[N].

    logits float32; temperature 0 takes the most likely token. The log-probs are those of the temperature-scaled full
    distribution, whatever `top_p` and `top_k` cut off (at temperature 0: of the unscaled one).
    """
    greedy_N = temperature_N == 0
    any_greedy = bool(greedy_N.any())
    scale_N = torch.where(greedy_N, 1.0, temperature_N) if any_greedy else temperature_N
    log_probs_NV = torch.log_softmax(logits_NV / scale_N[:, None], dim=-1)
    probs_NV = log_probs_NV.exp()
    if top_p_N is not None or top_k_N is not None:
        probs_NV = _truncate(probs_NV, top_p_N, top_k_N)
    tokens_N = _inverse_cdf(probs_NV, uniform_N)
    if any_greedy:
        tokens_N = torch.where(greedy_N, logits_NV.argmax(dim=-1), tokens_N)
    return tokens_N, log_probs_NV.gather(1, tokens_N[:, None])[:, 0]


def _inverse_cdf(weights_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """The first token at which the cumulative weight passes uniform × total; its weight is positive by construction."""
    cumulative_NV = torch.cumsum(weights_NV, dim=-1, dtype=torch.float64)
    threshold_N = uniform_N * cumulative_NV[:, -1]
    tokens_N = torch.searchsorted(cumulative_NV, threshold_N[:, None], right=True)[:, 0]
    return tokens_N.clamp_(max=weights_NV.shape[-1] - 1)


def _truncate(probs_NV: torch.Tensor, top_p_N: torch.Tensor | None, top_k_N: torch.Tensor | None) -> torch.Tensor:
    """Zero what lies outside the k most likely tokens or past cumulative probability p. The vocabulary keeps its order, so that a
    row that cuts nothing draws the same token whether or not its neighbours do."""
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    if top_k_N is not None:
        ranks_V = torch.arange(sorted_NV.shape[-1], device=sorted_NV.device)
        sorted_NV = sorted_NV.masked_fill((ranks_V >= top_k_N[:, None]) & (top_k_N[:, None] > 0), 0.0)
    if top_p_N is not None:
        before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
        limit_N = torch.where(top_p_N < 1, top_p_N * sorted_NV.sum(dim=-1), torch.inf)
        sorted_NV = sorted_NV.masked_fill(before_NV > limit_N[:, None], 0.0)
    return torch.zeros_like(probs_NV).scatter_(1, order_NV, sorted_NV)
