"""Rewards before group statistics: what a response's length costs."""

from __future__ import annotations

import torch


def overlong_penalty(lengths: torch.Tensor, *, max_response_tokens: int, buffer_tokens: int, factor: float = 1.0) -> torch.Tensor:
    """min(0, −(len − (L − buffer))/buffer·factor), to be added to each response's reward. lengths integer [B]; float32 [B].

    0 up to L − buffer, then falling to −factor at L. Soft overlong punishment of DAPO, arXiv 2503.14476 eq. 13.
    """
    assert 0 < buffer_tokens <= max_response_tokens
    beyond = lengths.to(torch.float64) - (max_response_tokens - buffer_tokens)
    return (-beyond / buffer_tokens * factor).clamp(max=0).to(torch.float32)
