"""Losses that single out the few tokens whose log-prob goes most with the advantage: those that entropy is lost to.

Which tokens these are depends on the whole mini-batch: `…_selection` says so once, before the first backward pass.
Source: The entropy mechanism of reinforcement learning, arXiv 2505.22617 section 4.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses.clipped import ppo_clip
from asyncrl.algorithms.losses.inputs import LossInputs, MiniBatch, TokenLoss
from asyncrl.algorithms.masking import masked
from asyncrl.config.entries import ClipCov, KlCov


def clip_cov(entry: ClipCov, inputs: LossInputs) -> TokenLoss:
    """ppo_clip; the tokens of `clip_cov_selection` have loss 0 and no gradient, and stay in the denominator.

    Clip-Cov, arXiv 2505.22617 section 4.
    """
    clipped = ppo_clip(entry, inputs)
    return TokenLoss(masked(clipped.values_BT, ~inputs.selected), {**clipped.flags, "selected": inputs.selected})


def kl_cov(entry: KlCov, inputs: LossInputs) -> TokenLoss:
    """−A·r, + coef·|log r| on the tokens of `kl_cov_selection`.

    KL-Cov, arXiv 2505.22617 section 4.
    """
    log_ratio_BT = inputs.log_ratio
    penalty_BT = masked(entry.coef * log_ratio_BT.abs(), inputs.selected)
    return TokenLoss(-inputs.A * log_ratio_BT.exp() + penalty_BT, {"selected": inputs.selected})


def clip_cov_selection(entry: ClipCov, batch: MiniBatch) -> torch.Tensor:
    """bool[B, T]: of the tokens with covariance in (low, high), the max(1, ⌊ratio·N⌋) of smallest hash of (seed, sample id,
    position); all of them where there are fewer."""
    assert batch.sample_ids_B is not None
    covariance_N = covariances(batch)
    hash_N = position_hash(entry.seed, batch.sample_ids_B, batch.mask_BT.shape[1])[batch.mask_BT]
    drawn_N = torch.nonzero((covariance_N > entry.low) & (covariance_N < entry.high))[:, 0]
    chosen_N = drawn_N[hash_N[drawn_N].argsort(stable=True)[: _quota(entry.ratio, len(covariance_N))]]
    return _at(chosen_N, batch.mask_BT)


def kl_cov_selection(entry: KlCov, batch: MiniBatch) -> torch.Tensor:
    """bool[B, T]: the max(1, ⌊ratio·N⌋) tokens of largest covariance. Equal ones go by the hash of (sample id, position), or by
    their place in the batch where there are no ids."""
    covariance_N = covariances(batch)
    order_N = torch.arange(len(covariance_N), device=covariance_N.device)
    if batch.sample_ids_B is not None:
        order_N = position_hash(0, batch.sample_ids_B, batch.mask_BT.shape[1])[batch.mask_BT].argsort(stable=True)
    ranked_N = order_N[covariance_N[order_N].argsort(descending=True, stable=True)]
    return _at(ranked_N[: _quota(entry.ratio, len(covariance_N))], batch.mask_BT)


def covariances(batch: MiniBatch) -> torch.Tensor:
    """[N] float64 of the trainable tokens, row by row: (A − mean A)(lp_prox − mean lp_prox), means over the mini-batch."""
    advantages_N, log_probs_N = batch.advantages_BT[batch.mask_BT].double(), batch.proximal_BT[batch.mask_BT].double()
    return (advantages_N - advantages_N.mean()) * (log_probs_N - log_probs_N.mean())


def position_hash(seed: int, sample_ids_B: torch.Tensor, width: int) -> torch.Tensor:
    """int64[B, T], whose order is random and depends on nothing but (seed, sample id, position): splitmix64 (Steele, Lea and
    Flood 2014), absorbing one word after the other, compared as unsigned."""
    positions_T = torch.arange(width, dtype=torch.int64, device=sample_ids_B.device)
    seeded = _mix(torch.tensor(seed, dtype=torch.int64, device=sample_ids_B.device))
    mixed_BT = _mix(_mix(seeded ^ sample_ids_B)[:, None] ^ positions_T)
    return mixed_BT ^ torch.iinfo(torch.int64).min  # signed order of these is the unsigned order of the hash


def _mix(words: torch.Tensor) -> torch.Tensor:
    """One step of splitmix64 on 64-bit words held as int64, whose arithmetic wraps."""
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _quota(ratio: float, tokens: int) -> int:
    return max(1, int(ratio * tokens))


def _at(chosen_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """True at these trainable tokens, counted row by row."""
    flags_N = torch.zeros(int(mask_BT.sum()), dtype=torch.bool, device=mask_BT.device)
    flags_N[chosen_N] = True
    return torch.zeros_like(mask_BT).masked_scatter(mask_BT, flags_N)
