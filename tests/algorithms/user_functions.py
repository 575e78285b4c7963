"""Functions of a user's own, named as tests.algorithms.user_functions:…"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.algorithms.advantages import RewardBatch
from asyncrl.algorithms.corrections import Corrected, CorrectionInputs
from asyncrl.algorithms.losses import LossInputs, TokenLoss


def scaled(batch: RewardBatch, *, factor: float = 1.0) -> torch.Tensor:
    return batch.rewards_B * factor


def wrong_shape(batch: RewardBatch) -> torch.Tensor:
    return torch.zeros(1, 1, 1)


def squared(inputs: LossInputs, *, power: float = 2.0) -> torch.Tensor:
    return -inputs.A * inputs.log_ratio.exp().pow(power)


def careless(inputs: LossInputs) -> torch.Tensor:
    return -inputs.advantages_BT * inputs.log_probs_BT.exp() / inputs.behaviour_BT.exp()


def flagged(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.A * inputs.lp, {"positive": inputs.A > 0})


def root(inputs: CorrectionInputs, *, exponent: float = 0.5) -> torch.Tensor:
    return inputs.ratio_BT.pow(exponent)


def first_only(inputs: CorrectionInputs) -> Corrected:
    mask_BT = inputs.mask_BT.clone()
    mask_BT[1:] = False
    return Corrected(inputs.ratio_BT, mask_BT)


def text(inputs: Any) -> str:
    return "no tensor"
