"""Estimators on returns: discounted over trainable tokens, whitened over the batch."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.batch import RewardBatch, group_statistics
from asyncrl.algorithms.masking import masked, whiten
from asyncrl.config.entries import Gae, ReinforcePp, ReinforcePpBaseline


def reinforce_pp(entry: ReinforcePp, batch: RewardBatch) -> torch.Tensor:
    """R on the last trainable token; return_t = r_t + γ·return_{t+1}, masked tokens skipped; whitened over the batch's trainable
    tokens: (x − mean)/sqrt(var_ddof1 + 1e-8).

    REINFORCE++, arXiv 2501.03262.
    """
    after_BT = batch.mask_BT.flip(1).cumsum(1).flip(1) - 1  # trainable tokens after this one
    gamma = torch.as_tensor(entry.gamma, dtype=torch.float64, device=batch.mask_BT.device)
    returns_BT = masked(batch.rewards_B, batch.rewards_B.isfinite()).double()[:, None] * gamma.pow(after_BT.clamp(min=0))
    if batch.penalty_BT is not None:
        zeros_BT = torch.zeros_like(returns_BT)
        returns_BT = returns_BT - gae_and_returns(batch.penalty_BT, zeros_BT, batch.mask_BT, gamma=entry.gamma, lam=1.0)[1]
    return whiten(returns_BT, batch.mask_BT)


def reinforce_pp_baseline(entry: ReinforcePpBaseline, batch: RewardBatch) -> torch.Tensor:
    """R − mean_g on every token (0 where the group's rewards are all equal), whitened over the batch's trainable tokens.

    REINFORCE++-baseline, arXiv 2501.03262.
    """
    group = group_statistics(batch.rewards_B, batch.groups_B)
    centred_B = masked(group.centred_B, group.differs_B)
    return whiten(centred_B[:, None].expand(batch.mask_BT.shape), batch.mask_BT)


def gae(entry: Gae, batch: RewardBatch) -> torch.Tensor:
    """δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}; R on the last trainable token; masked tokens skipped; V after the last
    token 0, also when truncated; whitened.

    GAE, arXiv 1506.02438 eq. 11, 12 and 16.
    """
    assert batch.values_BT is not None
    advantages_BT, _ = gae_and_returns(token_rewards(batch), batch.values_BT, batch.mask_BT, gamma=entry.gamma, lam=entry.lam)
    return advantages_BT


def token_rewards(batch: RewardBatch) -> torch.Tensor:
    """Each response's reward on its last trainable token, 0 elsewhere and where it is missing; less each token's penalty."""
    last_BT = batch.mask_BT & (batch.mask_BT.flip(1).cumsum(1).flip(1) == 1)
    rewards_BT = masked(batch.rewards_B[:, None].expand(last_BT.shape), last_BT & batch.rewards_B.isfinite()[:, None])
    return rewards_BT if batch.penalty_BT is None else rewards_BT - masked(batch.penalty_BT, batch.mask_BT)


def gae_and_returns(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_BT whitened, returns_BT = unwhitened A + V), both 0 outside the mask and of the dtype of the values. Computed
    in float64, since a long response sums many terms."""
    dtype = values_BT.dtype
    rewards_BT, values_BT = masked(rewards_BT, mask_BT).double(), masked(values_BT, mask_BT).double()
    raw_BT = torch.zeros_like(values_BT)
    following_B = value_after_B = torch.zeros_like(values_BT[:, 0]) if values_BT.shape[1] else values_BT.sum(1)
    for position in reversed(range(values_BT.shape[1])):
        here_B = mask_BT[:, position]
        delta_B = rewards_BT[:, position] + gamma * value_after_B - values_BT[:, position]
        following_B = torch.where(here_B, delta_B + gamma * lam * following_B, following_B)
        value_after_B = torch.where(here_B, values_BT[:, position], value_after_B)
        raw_BT[:, position] = masked(following_B, here_B)
    return whiten(raw_BT, mask_BT).to(dtype), (raw_BT + values_BT).to(dtype)
