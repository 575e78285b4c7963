"""Log-probs of chosen tokens from hidden states, without ever holding the logits of all of them.

The logits of N tokens over a vocabulary V are N·V numbers, more than the whole rest of a small model's activations. Here they
exist for one chunk of tokens at a time, in the forward pass and again in the backward pass, always in float32 (float64 for
float64 weights).
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 25
"""Logits held at once: 128 MiB in float32."""


def token_log_probs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    squares: bool = False,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log_probs_N, entropy_N, sum_pi_squared_N) of π = softmax((hidden·Wᵀ + bias)/temperature), float32 or wider. Log-probs
    carry a gradient, and so does the entropy where `entropy_gradient` asks for it. Σπ² is over the vocabulary, and empty unless
    `squares` asks for it."""
    chunk = max(1, chunk_elements // weight_VH.shape[0])
    return _TokenLogProbs.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature, squares, entropy_gradient, chunk)


def log_probs_of_logits(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    squares: bool = False,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same from logits, for models whose logits are more than their head's output."""
    log_softmax_NV = (_wide(logits_NV) / temperature).log_softmax(-1)
    known_NV = log_softmax_NV if entropy_gradient else log_softmax_NV.detach()
    probabilities_NV = known_NV.exp()
    entropy_N = -(probabilities_NV * known_NV).sum(-1)
    squares_N = probabilities_NV.detach().square().sum(-1) if squares else entropy_N[:0].detach()
    return log_softmax_NV[torch.arange(len(targets_N), device=targets_N.device), targets_N], entropy_N, squares_N


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = _wide(torch.nn.functional.linear(hidden, weight, bias))
    return logits if temperature == 1.0 else logits / temperature


def _softmax(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities_NV, logsumexp_N) with one pass of exponentials for both: they are most of what an entropy costs."""
    largest_N1 = logits_NV.amax(-1, keepdim=True)
    probabilities_NV = (logits_NV - largest_N1).exp_()
    sums_N1 = probabilities_NV.sum(-1, keepdim=True)
    return probabilities_NV.div_(sums_N1), (largest_N1 + sums_N1.log())[:, 0]


class _TokenLogProbs(torch.autograd.Function):
    """d log p(target)/d logits = (onehot(target) − softmax)/temperature, d entropy/d logits = −softmax·(log softmax +
    entropy)/temperature; softmax is computed again from the saved logsumexp."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        squares: bool,
        entropy_gradient: bool,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        normalisers = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        log_probs, entropies = torch.empty_like(normalisers), torch.empty_like(normalisers)
        sums = torch.empty_like(normalisers) if squares else normalisers[:0].clone()
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, temperature)
            probabilities, normalisers[part] = _softmax(logits)
            log_probs[part] = logits.gather(1, targets[part, None])[:, 0] - normalisers[part]
            if squares:
                sums[part] = probabilities.square().sum(-1)
            entropies[part] = normalisers[part] - probabilities.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies if entropy_gradient else None)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(*([sums] if entropy_gradient else [entropies, sums]))
        return log_probs, entropies, sums

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropies: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=normalisers.dtype, device=weight.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=normalisers.dtype, device=bias.device)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_softmax = _logits(hidden[part], weight, bias, ctx.temperature).sub_(normalisers[part, None])
            scale = grad_log_probs[part, None] / ctx.temperature
            if entropies is None:
                grad = log_softmax.exp_().mul_(-scale)
            else:
                pull = grad_entropies[part, None] / ctx.temperature
                grad = log_softmax.exp().mul_((log_softmax + entropies[part, None]).mul_(-pull).sub_(scale))
            grad.scatter_add_(1, targets[part, None], scale)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None, None
