"""Advantage estimators. R is a response's total reward, g its prompt group, n the number of g's scored responses.

    outcome.py   one advantage per response      returns.py   discounted returns, GAE
    batch.py     what they are given             token_baseline.py   a baseline of every token's own
    distilled.py a teacher's word on every token

A missing reward (NaN) is outside its group's statistics, has advantage 0, and its tokens leave the mask. A group of one has
advantage 0 in every group-relative estimator; where a group's rewards are all equal (max = min) it is exactly 0 in those whose
formula compares rewards. A penalty per token (the divergence from a reference, in the reward) is part of R in all of this; `gae`
and `reinforce_pp` take it at its token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from asyncrl.algorithms.advantages.batch import GroupStatistics, RewardBatch, group_statistics
from asyncrl.algorithms.advantages.distilled import distillation
from asyncrl.algorithms.advantages.outcome import gdpo, gpg, grpo, grpo_passk, opo, remax, rloo
from asyncrl.algorithms.advantages.returns import gae, gae_and_returns, reinforce_pp, reinforce_pp_baseline, token_rewards
from asyncrl.algorithms.advantages.token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from asyncrl.algorithms.custom import call
from asyncrl.algorithms.masking import masked
from asyncrl.config.entries import Entry, UserFunction
from asyncrl.errors import UserError

ADVANTAGES: dict[str, Callable[[Any, RewardBatch], torch.Tensor]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "gae": gae,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
    "distillation": distillation,
}
"""Name of the entry to its function: (entry, batch) to advantages [B] or [B, T], free outside the mask."""


def trainable_mask(entry: Entry, batch: RewardBatch) -> torch.Tensor:
    """bool[B, T]: the mask without the tokens of responses that have no reward, or lack another figure that the estimator
    needs."""
    return batch.mask_BT & _scored(entry, batch)[:, None]


def estimate(entry: Entry, batch: RewardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_BT, mask_BT): advantages of the dtype of the rewards, 0 outside the mask, which is `trainable_mask`."""
    scored_B = _scored(entry, batch)
    mask_BT = batch.mask_BT & scored_B[:, None]
    scored = replace(batch, rewards_B=masked(batch.rewards_B, scored_B, torch.nan), mask_BT=mask_BT)
    if not entry.needs.token_rewards:
        scored = scored.with_penalty_in_rewards()
    values = _users(entry, scored) if isinstance(entry, UserFunction) else ADVANTAGES[entry.name](entry, scored)
    values_BT = values[:, None].expand(mask_BT.shape) if values.dim() == 1 else values
    return masked(values_BT.to(batch.rewards_B.dtype), mask_BT), mask_BT


def _scored(entry: Entry, batch: RewardBatch) -> torch.Tensor:
    scored_B = batch.rewards_B.isfinite()
    if entry.needs.components and batch.components_BK is not None:
        scored_B = scored_B & batch.components_BK.isfinite().all(1)
    if entry.needs.greedy and batch.greedy_B is not None:
        scored_B = scored_B & batch.greedy_B.isfinite()
    return scored_B


def _users(entry: UserFunction, batch: RewardBatch) -> torch.Tensor:
    values = call("advantage", entry, batch)
    shapes = (tuple(batch.rewards_B.shape), tuple(batch.mask_BT.shape))
    if not isinstance(values, torch.Tensor) or tuple(values.shape) not in shapes:
        found = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
        raise UserError(
            f"an advantage function returns a tensor [B] {shapes[0]} or [B, T] {shapes[1]}, but {entry.name} returned {found}: "
            "return one advantage for each response or for each token"
        )
    return values


__all__ = [
    "ADVANTAGES", "GroupStatistics", "RewardBatch", "estimate", "gae_and_returns", "group_statistics", "token_rewards",
    "trainable_mask",
]  # fmt: skip
