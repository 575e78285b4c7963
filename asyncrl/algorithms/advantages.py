"""Advantage estimators. R is a response's total reward, g its prompt group, n the number of g's scored responses.

A missing reward (NaN) is outside its group's statistics, has advantage 0, and its tokens leave the mask. A group of one, and a
group whose rewards are all equal (max = min), has advantage exactly 0 in every group-relative estimator.

Sources: GRPO, arXiv 2402.03300 eq. 3; Dr.GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740; REINFORCE++, arXiv 2501.03262.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.algorithms.masking import masked, whiten
from asyncrl.config.entries import Entry, Grpo, ReinforcePp, Rloo


@dataclass(frozen=True)
class RewardBatch:
    """The whole batch of a step. rewards_B floating, NaN where missing; groups_B int64, 0 … num_groups − 1; mask_BT bool,
    the trainable tokens."""

    rewards_B: torch.Tensor
    groups_B: torch.Tensor
    mask_BT: torch.Tensor


def estimate(entry: Entry, batch: RewardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_BT, mask_BT): advantages of the dtype of the rewards, 0 outside the mask, and the mask without the tokens of
    responses that have no reward."""
    mask_BT = batch.mask_BT & batch.rewards_B.isfinite()[:, None]
    scored = RewardBatch(batch.rewards_B, batch.groups_B, mask_BT)
    return masked(ADVANTAGES[entry.name](entry, scored), mask_BT), mask_BT  # type: ignore[attr-defined]


@dataclass(frozen=True)
class GroupStatistics:
    """Of each response's group, over its scored members: n, R − mean, std with ddof 1 (0 for n < 2), and whether its rewards
    differ."""

    count_B: torch.Tensor
    centred_B: torch.Tensor
    std_B: torch.Tensor
    differs_B: torch.Tensor


def group_statistics(rewards_B: torch.Tensor, groups_B: torch.Tensor) -> GroupStatistics:
    """Per-response view of its group's statistics; `centred_B` is 0 for a missing reward."""
    scored_B = rewards_B.isfinite()
    clean_B = masked(rewards_B, scored_B)
    groups = int(groups_B.max()) + 1 if len(groups_B) else 0
    zeros_G = torch.zeros(groups, dtype=rewards_B.dtype, device=rewards_B.device)
    count_G = zeros_G.index_add(0, groups_B, scored_B.to(rewards_B.dtype))
    mean_G = zeros_G.index_add(0, groups_B, clean_B) / count_G.clamp(min=1)
    centred_B = masked(clean_B - mean_G[groups_B], scored_B)
    variance_G = zeros_G.index_add(0, groups_B, centred_B.square()) / (count_G - 1).clamp(min=1)
    largest_G = zeros_G.sub(torch.inf).scatter_reduce(0, groups_B, masked(rewards_B, scored_B, -torch.inf), "amax")
    smallest_G = zeros_G.add(torch.inf).scatter_reduce(0, groups_B, masked(rewards_B, scored_B, torch.inf), "amin")
    return GroupStatistics(count_G[groups_B], centred_B, variance_G.sqrt()[groups_B], (largest_G > smallest_G)[groups_B])


def grpo(entry: Grpo, batch: RewardBatch) -> torch.Tensor:
    """(R − mean_g)/(std_g + 1e-6); `normalize_std: false` is R − mean_g."""
    group = group_statistics(batch.rewards_B, batch.groups_B)
    value_B = group.centred_B / (group.std_B + 1e-6) if entry.normalize_std else group.centred_B
    return masked(value_B, group.differs_B)[:, None].expand(batch.mask_BT.shape)


def rloo(entry: Rloo, batch: RewardBatch) -> torch.Tensor:
    """n/(n − 1)·(R − mean_g): R less the mean of the others."""
    group = group_statistics(batch.rewards_B, batch.groups_B)
    value_B = group.centred_B * group.count_B / (group.count_B - 1).clamp(min=1)
    return masked(value_B, group.differs_B)[:, None].expand(batch.mask_BT.shape)


def reinforce_pp(entry: ReinforcePp, batch: RewardBatch) -> torch.Tensor:
    """R on the last trainable token, discounted by γ per trainable token towards the front, whitened over the batch's tokens."""
    after_BT = batch.mask_BT.flip(1).cumsum(1).flip(1) - 1  # trainable tokens after this one
    discount_BT = torch.as_tensor(entry.gamma, dtype=batch.rewards_B.dtype).pow(after_BT.clamp(min=0))
    returns_BT = masked(batch.rewards_B, batch.rewards_B.isfinite())[:, None] * discount_BT
    return whiten(returns_BT, batch.mask_BT)


ADVANTAGES: dict[str, Callable[[Any, RewardBatch], torch.Tensor]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
}
"""Name of the entry to its function: (entry, batch) to advantages_BT, free outside the mask."""
