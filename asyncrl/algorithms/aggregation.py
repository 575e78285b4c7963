"""From token values to one loss, over the global batch of one optimizer update.

Every aggregation is a sum of token values, each times its response's coefficient. The coefficients come from the lengths of the
whole global batch, so the gradient is the same for any cut into micro-batches and ranks: each adds its own terms.

Sources: token_mean, DAPO, arXiv 2503.14476 eq. 8; seq_mean_token_mean, GRPO, arXiv 2402.03300 eq. 3; seq_mean_token_sum_norm,
Dr.GRPO, arXiv 2503.20783 section 3.2.
"""

from __future__ import annotations

from typing import get_args

import torch

from asyncrl.config.entries import Aggregation

AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def response_coefficients(
    aggregation: Aggregation, lengths_B: torch.Tensor, *, max_response_tokens: float, denominator: float | None = None
) -> torch.Tensor:
    """float64[B], the coefficient of every token of a response. lengths_B: trainable tokens of each response of the global batch.

    With N trainable tokens and S responses that have one: token_mean 1/N; token_sum 1; seq_mean_token_sum 1/S;
    seq_mean_token_mean 1/(S·length); seq_mean_token_sum_norm 1/(S·max_response_tokens). 0 for a response without a trainable
    token. denominator: the global batch's N or S, where `lengths_B` is only a part of it; None counts them in `lengths_B`.
    """
    lengths = lengths_B.to(torch.float64)
    present = lengths > 0
    tokens, responses = lengths.sum().clamp(min=1), present.sum().clamp(min=1).to(torch.float64)
    if denominator is not None:
        tokens = responses = torch.tensor(denominator, dtype=torch.float64, device=lengths.device)
    if aggregation == "token_mean":
        value = (1 / tokens).expand(lengths.shape)
    elif aggregation == "token_sum":
        value = torch.ones_like(lengths)
    elif aggregation == "seq_mean_token_sum":
        value = (1 / responses).expand(lengths.shape)
    elif aggregation == "seq_mean_token_mean":
        value = 1 / (responses * lengths.clamp(min=1))
    elif aggregation == "seq_mean_token_sum_norm":
        value = (1 / (responses * max_response_tokens)).expand(lengths.shape)
    else:
        raise AssertionError(f"no aggregation named {aggregation}")
    return torch.where(present, value, torch.zeros_like(value))
