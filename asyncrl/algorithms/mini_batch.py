"""What is judged of a whole mini-batch, all ranks together, once lp_prox is known and before the first backward pass.

    lp_prox, lp_behave, A, mask ──▶ correction ──▶ w, mask that is left ──▶ selection of the loss
                                                        └──▶ denominator

A correction that drops moves the denominator, `batch_normalize` divides by a mean, and clip_cov, kl_cov and m2po single tokens
out: none of these can be known of a micro-batch alone. Each micro-batch is then given its rows of what came out, so that the
gradient is the same for any cut. Where `is_needed` says no, every micro-batch can correct itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from asyncrl.algorithms.corrections import CorrectionInputs, correct, denominator_mask
from asyncrl.algorithms.losses import MiniBatch, loss_needs, select
from asyncrl.config.entries import Entry


@dataclass(frozen=True)
class Judged:
    """weights_BT, w, without gradient; mask_BT bool, the tokens that train; lengths_B int64, the tokens of each response that the
    loss's coefficients are made of (`aggregation.response_coefficients`); selected_BT for `LossInputs`, or None; flags of the
    correction, for its report."""

    weights_BT: torch.Tensor
    mask_BT: torch.Tensor
    lengths_B: torch.Tensor
    selected_BT: torch.Tensor | None
    flags: Mapping[str, torch.Tensor] = field(default_factory=dict)


def is_needed(loss: Entry, correction: Entry) -> bool:
    """Whether lp_prox of the whole mini-batch has to be known before its first backward pass."""
    return loss_needs(loss).mini_batch or correction.needs.mini_batch


def judge(loss: Entry, correction: Entry, batch: MiniBatch, staleness_BT: torch.Tensor) -> Judged:
    """Correct the mini-batch, then let the loss select among the tokens that are left. staleness_BT int64 ≥ 0."""
    inputs = CorrectionInputs.of(batch.proximal_BT, batch.behaviour_BT, staleness_BT, batch.mask_BT)
    corrected = correct(correction, inputs)
    left = MiniBatch(batch.proximal_BT, batch.behaviour_BT, batch.advantages_BT, corrected.mask_BT, batch.sample_ids_B)
    return Judged(
        corrected.weights_BT,
        corrected.mask_BT,
        denominator_mask(correction, batch.mask_BT, corrected).sum(1),
        select(loss, left),
        corrected.flags,
    )
