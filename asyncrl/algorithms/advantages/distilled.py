"""On-policy distillation: a teacher judges what the student sampled, token by token: [B, T]."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.batch import RewardBatch
from asyncrl.algorithms.masking import clamped_log_ratio, masked
from asyncrl.config.entries import Distillation


def distillation(entry: Distillation, batch: RewardBatch) -> torch.Tensor:
    """A_t = coefficient·clamp(lp_teacher − lp_behaviour, ±20) + reward_coefficient·R: one sample of minus the reverse KL.

    On-policy distillation with the reverse KL, GKD, arXiv 2306.13649 section 3; no baseline.
    """
    assert batch.teacher_BT is not None
    assert batch.behaviour_BT is not None
    ratio_BT = clamped_log_ratio(batch.teacher_BT.double(), batch.behaviour_BT.double(), batch.mask_BT)
    rewards_B = masked(batch.rewards_B.double(), batch.rewards_B.isfinite())
    return entry.coefficient * ratio_BT + entry.reward_coefficient * rewards_B[:, None]
