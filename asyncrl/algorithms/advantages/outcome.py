"""Estimators that give every token of a response the same advantage: [B]."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.batch import RewardBatch, group_statistics
from asyncrl.algorithms.masking import masked
from asyncrl.config.entries import Gdpo, GpgAdvantage, Grpo, GrpoPassk, Opo, Remax, Rloo


def grpo(entry: Grpo, batch: RewardBatch) -> torch.Tensor:
    """(R − mean_g)/(std_g + 1e-6), std with ddof 1; `normalize_std: false` is R − mean_g.

    GRPO, arXiv 2402.03300 section 4.1.2; without the division Dr.GRPO, arXiv 2503.20783 section 3.2.
    """
    return _group_relative(batch.rewards_B, batch.groups_B, entry.normalize_std)


def rloo(entry: Rloo, batch: RewardBatch) -> torch.Tensor:
    """n/(n − 1)·(R − mean_g): R less the mean of the others.

    RLOO, arXiv 2402.14740.
    """
    group = group_statistics(batch.rewards_B, batch.groups_B)
    value_B = group.centred_B * group.count_B / (group.count_B - 1).clamp(min=1)
    return masked(value_B, group.differs_B)


def remax(entry: Remax, batch: RewardBatch) -> torch.Tensor:
    """R − R(greedy response to the same prompt).

    ReMax, arXiv 2310.10505 algorithm 1.
    """
    assert batch.greedy_B is not None
    return batch.rewards_B.double() - batch.greedy_B.double()


def opo(entry: Opo, batch: RewardBatch) -> torch.Tensor:
    """R − Σ len·R/Σ len over g; len = trainable tokens.

    OPO, arXiv 2505.23585: the optimal reward baseline where gradient norms grow with length.
    """
    scored_B = batch.rewards_B.isfinite()
    rewards_B = masked(batch.rewards_B, scored_B).double()
    lengths_B = masked(batch.lengths_B.double(), scored_B)
    zeros_G = torch.zeros(batch.num_groups, dtype=torch.float64, device=rewards_B.device)
    weighted_G = zeros_G.index_add(0, batch.groups_B, lengths_B * rewards_B)
    baseline_G = weighted_G / zeros_G.index_add(0, batch.groups_B, lengths_B).clamp(min=1)
    differs_B = group_statistics(batch.rewards_B, batch.groups_B).differs_B
    return masked(rewards_B - baseline_G[batch.groups_B], differs_B)


def gpg(entry: GpgAdvantage, batch: RewardBatch) -> torch.Tensor:
    """(R − mean_g)·B/(number of responses in groups whose rewards differ)/f_norm; B counts scored responses.

    GPG, arXiv 2504.02546: the gradient that groups without a difference lack is given to the others.
    """
    group = group_statistics(batch.rewards_B, batch.groups_B)
    scored_B = batch.rewards_B.isfinite()
    share = scored_B.sum().double() / (scored_B & group.differs_B).sum().clamp(min=1)
    return masked(group.centred_B * share / entry.f_norm, group.differs_B)


def grpo_passk(entry: GrpoPassk, batch: RewardBatch) -> torch.Tensor:
    """Only the best of g: (R1 − R2)/(std_g + 1e-6), R1 and R2 its two largest rewards; R1 − R2 with `normalize_std: false`. A tie
    gives 0, and so does every other response.

    Pass@k objectives, arXiv 2503.19595.
    """
    group = group_statistics(batch.rewards_B, batch.groups_B)
    rewards_B = masked(batch.rewards_B, batch.rewards_B.isfinite(), -torch.inf).double()
    lowest_G = torch.full((batch.num_groups,), -torch.inf, dtype=torch.float64, device=rewards_B.device)
    best_B = lowest_G.scatter_reduce(0, batch.groups_B, rewards_B, "amax")[batch.groups_B]
    is_best_B = (rewards_B == best_B) & batch.rewards_B.isfinite()
    best_members_G = torch.zeros_like(lowest_G).index_add(0, batch.groups_B, is_best_B.double())
    others_B = masked(rewards_B, ~is_best_B, -torch.inf)
    second_B = lowest_G.scatter_reduce(0, batch.groups_B, others_B, "amax")[batch.groups_B]
    lead_B = best_B - second_B
    value_B = lead_B / (group.std_B + 1e-6) if entry.normalize_std else lead_B
    return masked(value_B, is_best_B & (best_members_G[batch.groups_B] == 1) & group.differs_B)


def gdpo(entry: Gdpo, batch: RewardBatch) -> torch.Tensor:
    """x = Σ_k weight_k·grpo(component k), then (x − mean_B)/(std_B + 1e-6) over the scored responses, std with ddof 1.

    GDPO, arXiv 2601.05242. A response is scored when its reward and all its components are finite. Where all x are
    equal, or there is one, the advantage is 0.
    """
    assert batch.components_BK is not None
    assert batch.component_weights_K is not None
    scored_B = batch.rewards_B.isfinite()
    x_B = torch.zeros(len(scored_B), dtype=torch.float64, device=scored_B.device)
    for component_B, weight in zip(batch.components_BK.unbind(1), batch.component_weights_K.tolist(), strict=True):
        x_B = x_B + weight * _group_relative(masked(component_B, scored_B, torch.nan), batch.groups_B, normalize_std=True)
    over_batch = group_statistics(masked(x_B, scored_B, torch.nan), torch.zeros_like(batch.groups_B))
    return masked(over_batch.centred_B / (over_batch.std_B + 1e-6), over_batch.differs_B)


def _group_relative(rewards_B: torch.Tensor, groups_B: torch.Tensor, normalize_std: bool) -> torch.Tensor:
    group = group_statistics(rewards_B, groups_B)
    value_B = group.centred_B / (group.std_B + 1e-6) if normalize_std else group.centred_B
    return masked(value_B, group.differs_B)
