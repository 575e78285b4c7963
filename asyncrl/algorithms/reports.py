"""What is reported of a correction, in all and by staleness 0, 1, 2, …: sums that add over micro-batches and ranks, and the
figures made of them at the end.

With w = π_prox/π_behave per token: mean, population std and max of w; effective sample size (Σw)²/(nΣw²); the share of tokens
with each flag; KL(behave‖prox) estimated as mean(w − 1 − log w), `kl`, and mean(−log w), `kl_k1`; chi-square as mean(w²) − 1;
perplexity of both policies, exp(−mean log-prob).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

SUMS = ("tokens", "ratio", "ratio_squared", "k3", "behaviour", "proximal")
FLAGS = ("truncated", "banded", "dropped", "vetoed")


def correction_sums(
    *,
    ratio_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    proximal_BT: torch.Tensor,
    staleness_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    flags: Mapping[str, torch.Tensor],
    levels: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums[levels, len(SUMS) + len(FLAGS)], largest[levels]) in float64, by staleness; the last level holds everything older."""
    ratio = ratio_BT[mask_BT].double()
    behaviour, proximal = behaviour_BT[mask_BT].double(), proximal_BT[mask_BT].double()
    level = staleness_BT[mask_BT].clamp(max=levels - 1)
    absent = torch.zeros_like(ratio)
    columns = [torch.ones_like(ratio), ratio, ratio.square(), ratio - 1 - ratio.log(), behaviour, proximal]
    columns += [flags[name][mask_BT].double() if name in flags else absent for name in FLAGS]
    sums = torch.zeros(levels, len(columns), dtype=torch.float64, device=ratio.device)
    sums.index_add_(0, level, torch.stack(columns, dim=1))
    largest = torch.zeros(levels, dtype=torch.float64, device=ratio.device)
    return sums, largest.scatter_reduce_(0, level, ratio, "amax")


def correction_metrics(sums: torch.Tensor, largest: torch.Tensor) -> dict[str, float]:
    """Flat names: ``correction/weight_mean`` …, and ``correction/staleness_1/weight_mean`` … for each level that has a token."""
    rows, tops = sums.tolist(), largest.tolist()
    metrics = _figures("correction/", [sum(column) for column in zip(*rows, strict=True)], max(tops, default=0.0))
    for level, (row, top) in enumerate(zip(rows, tops, strict=True)):
        metrics |= _figures(f"correction/staleness_{level}/", row, top)
    return metrics


def _figures(prefix: str, row: Sequence[float], largest: float) -> dict[str, float]:
    tokens, ratio, squared, k3, behaviour, proximal = row[: len(SUMS)]
    if not tokens:
        return {}
    mean = ratio / tokens
    figures = {
        "weight_mean": mean,
        "weight_std": math.sqrt(max(0.0, squared / tokens - mean * mean)),
        "weight_max": largest,
        "effective_sample_size": ratio * ratio / (tokens * squared) if squared else 0.0,
        "kl": k3 / tokens,
        "kl_k1": (behaviour - proximal) / tokens,
        "chi2": squared / tokens - 1,
        "perplexity_behaviour": _exp(-behaviour / tokens),
        "perplexity_proximal": _exp(-proximal / tokens),
        "tokens": tokens,
    }
    figures |= {name: value / tokens for name, value in zip(FLAGS, row[len(SUMS) :], strict=True)}
    return {prefix + name: value for name, value in figures.items()}


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
