"""What is judged of a whole mini-batch makes any cut of it the same: every loss with what drops, normalises or singles out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms import correction as public_correction
from asyncrl.algorithms import policy_loss
from asyncrl.algorithms.aggregation import response_coefficients
from asyncrl.algorithms.losses import LossInputs, MiniBatch, token_loss
from asyncrl.algorithms.mini_batch import is_needed, judge
from asyncrl.config.entries import Correction, Loss, entries_of
from tests.algorithms.batches import random_batch, tensor

LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {}, "gspo": {}, "gmpo": {}, "clip_cov": {"low": 0.01, "ratio": 0.2}, "kl_cov": {"ratio": 0.2},
}  # fmt: skip
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "token_tis": {"veto": 0.7},
    "seq_mis": {},
    "k3_mask_seq_tis": {"high": 0.04},
    "general": {"batch_normalize": True, "reject": [{"by": "token", "figure": "k1", "low": 0.7, "high": 1.4}]},
}


@pytest.mark.parametrize("denominator", ["kept", "all"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_cut_has_the_gradient_of_the_whole(loss, correction, denominator):
    params = CORRECTIONS[correction] if correction == "none" else {**CORRECTIONS[correction], "denominator": denominator}
    loss_entry = entries_of(Loss)[loss].model_validate(LOSSES[loss])
    correction_entry = entries_of(Correction)[correction].model_validate(params)
    batch = random_batch(3, groups=8, spread=0.3)
    if loss == "gmpo":
        batch.advantages[:] = batch.advantages[:, :1]
    fields = (batch.proximal, batch.behaviour, batch.advantages, batch.mask, batch.ids)
    proximal, behaviour, advantages, mask, ids = map(tensor, fields)
    judged = judge(loss_entry, correction_entry, MiniBatch(proximal, behaviour, advantages, mask, ids), tensor(batch.staleness))
    coefficients = response_coefficients(loss_entry.aggregation, judged.lengths_B, max_response_tokens=9)
    gradients = []
    for cuts in (1, 3, len(batch.mask)):
        log_probs = tensor(batch.log_probs).requires_grad_()
        for rows in np.array_split(np.arange(len(batch.mask)), cuts):
            chosen = None if judged.selected_BT is None else judged.selected_BT[rows]
            parts = (log_probs, proximal, behaviour, advantages, judged.weights_BT, judged.mask_BT)
            values = token_loss(loss_entry, LossInputs(*(part[rows] for part in parts), chosen)).values_BT
            (values * coefficients[rows, None]).sum().backward()
        gradients.append(log_probs.grad)
    for other in gradients[1:]:
        np.testing.assert_allclose(other, gradients[0], atol=1e-12)
    assert gradients[0].abs().sum() > 0
    assert torch.count_nonzero(gradients[0][~judged.mask_BT]) == 0
    if denominator == "kept":
        weights, kept, _ = public_correction(
            {"name": correction, **CORRECTIONS[correction]},
            proximal_log_probs=proximal,
            behaviour_log_probs=behaviour,
            mask=mask,
            token_staleness=tensor(batch.staleness),
        )
        log_probs = tensor(batch.log_probs).requires_grad_()
        policy_loss(
            {"name": loss, **LOSSES[loss]}, log_probs=log_probs, old_log_probs=proximal, behaviour_log_probs=behaviour,
            advantages=advantages, mask=kept, weights=weights, sample_ids=ids,
        )[0].backward()  # fmt: skip
        np.testing.assert_allclose(log_probs.grad, gradients[0], atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "correction", "needed"),
    [
        ("ppo_clip", {"name": "staleness_tis"}, False),
        ("gspo", {"name": "seq_tis"}, False),
        ("clip_cov", {"name": "none"}, True),
        ("m2po", {"name": "none"}, True),
        ("ppo_clip", {"name": "geo_mis"}, True),
        ("ppo_clip", {"name": "token_tis", "veto": 1e-4}, True),
        ("ppo_clip", {"name": "general", "batch_normalize": True}, True),
    ],
)
def test_it_is_said_when_the_whole_mini_batch_is_needed(loss, correction, needed):
    entry = entries_of(Correction)[correction["name"]].model_validate(correction)
    assert is_needed(entries_of(Loss)[loss](), entry) == needed
