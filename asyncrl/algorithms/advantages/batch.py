"""What an estimator is given: the whole batch of a step; and the statistics of its groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from asyncrl.algorithms.masking import masked


@dataclass(frozen=True)
class RewardBatch:
    """The whole batch of a step. rewards_B floating, NaN where missing; groups_B int64, 0 … num_groups − 1; mask_BT bool,
    the trainable tokens.

    Only for the estimators that need them: components_BK, the reward functions' scores, with their weights component_weights_K;
    greedy_B, the reward of the greedy response to the same prompt; teacher_BT and behaviour_BT, log-probs under a teacher and
    under the policy that sampled; values_BT, a critic's; log_probs_BT and sum_pi_squared_BT (Σπ² over the vocabulary) under the
    proximal policy.

    penalty_BT: what each token takes from the reward where it stands (algorithm.kl in the reward), None for nothing. `estimate`
    subtracts its sum from the reward for an estimator of whole responses.
    """

    rewards_B: torch.Tensor
    groups_B: torch.Tensor
    mask_BT: torch.Tensor
    components_BK: torch.Tensor | None = None
    component_weights_K: torch.Tensor | None = None
    greedy_B: torch.Tensor | None = None
    teacher_BT: torch.Tensor | None = None
    behaviour_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None
    log_probs_BT: torch.Tensor | None = None
    sum_pi_squared_BT: torch.Tensor | None = None
    penalty_BT: torch.Tensor | None = None

    @property
    def num_groups(self) -> int:
        return int(self.groups_B.max()) + 1 if len(self.groups_B) else 0

    @property
    def lengths_B(self) -> torch.Tensor:
        """Trainable tokens of each response."""
        return self.mask_BT.sum(1)

    def with_penalty_in_rewards(self) -> RewardBatch:
        """Each response's penalty summed, and taken from its reward."""
        if self.penalty_BT is None:
            return self
        spent_B = masked(self.penalty_BT, self.mask_BT).sum(1, dtype=torch.float64)
        rewards_B = (self.rewards_B.double() - spent_B).to(self.rewards_B.dtype)
        return replace(self, rewards_B=rewards_B, penalty_BT=None)


@dataclass(frozen=True)
class GroupStatistics:
    """Of each response's group, over its scored members, in float64: n, R − mean, std with ddof 1 (0 for n < 2), and whether its
    rewards differ."""

    count_B: torch.Tensor
    centred_B: torch.Tensor
    std_B: torch.Tensor
    differs_B: torch.Tensor


def group_statistics(rewards_B: torch.Tensor, groups_B: torch.Tensor) -> GroupStatistics:
    """Per-response view of its group's statistics; `centred_B` is 0 for a missing reward."""
    scored_B = rewards_B.isfinite()
    clean_B = masked(rewards_B, scored_B).double()
    groups = int(groups_B.max()) + 1 if len(groups_B) else 0
    zeros_G = torch.zeros(groups, dtype=torch.float64, device=rewards_B.device)
    count_G = zeros_G.index_add(0, groups_B, scored_B.double())
    mean_G = zeros_G.index_add(0, groups_B, clean_B) / count_G.clamp(min=1)
    centred_B = masked(clean_B - mean_G[groups_B], scored_B)
    variance_G = zeros_G.index_add(0, groups_B, centred_B.square()) / (count_G - 1).clamp(min=1)
    largest_G = zeros_G.sub(torch.inf).scatter_reduce(0, groups_B, masked(clean_B, scored_B, -torch.inf), "amax")
    smallest_G = zeros_G.add(torch.inf).scatter_reduce(0, groups_B, masked(clean_B, scored_B, torch.inf), "amin")
    return GroupStatistics(count_G[groups_B], centred_B, variance_G.sqrt()[groups_B], (largest_G > smallest_G)[groups_B])
