"""What a micro-batch computes, against numpy, with log-probs in the place of a model: every loss and correction that judges no
mini-batch as a whole, and any cut of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.aggregation import response_coefficients
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.entries import Correction, Loss, entries_of
from asyncrl.engines.fsdp.update import MicroBatchView, StepWork, micro_loss
from tests.algorithms import reference_corrections, reference_losses
from tests.algorithms.batches import Batch, random_batch, tensor

LEVELS = 4
LOSSES = [name for name, entry in entries_of(Loss).items() if not entry.requires.mini_batch]
CORRECTIONS = [name for name, entry in entries_of(Correction).items() if not entry.requires.mini_batch]
BEHAVIOUR = [name for name in LOSSES if not entries_of(Loss)[name].requires.weight]
NO_RATIO = ("reinforce", "gpg")


def batch_for(loss: str, seed: int = 0) -> Batch:
    batch = random_batch(seed, spread=0.3)
    if loss == "gmpo":
        batch.advantages[:] = batch.advantages[:, :1]
    return batch


def gradient(batch: Batch, algorithm: AlgorithmConfig, cuts: int = 1) -> tuple[float, Any]:
    """(loss, gradient [B, T]) of the update, micro-batch by micro-batch."""
    mask = tensor(batch.mask)
    work = StepWork(
        None, None, None, mask, mask, tensor(batch.advantages), tensor(batch.behaviour), tensor(batch.staleness),  # type: ignore[arg-type]
        proximal_BT=tensor(batch.proximal) if algorithm.proximal == "recompute" else None,
    )  # fmt: skip
    coefficients = response_coefficients(algorithm.loss.aggregation, mask.sum(1), max_response_tokens=9)
    log_probs = tensor(batch.log_probs).requires_grad_()
    total = 0.0
    for rows in np.array_split(np.arange(len(batch.mask)), cuts):
        micro = MicroBatchView(Inputs(), torch.tensor(rows), mask.shape[1], mask[rows], empty=False)  # type: ignore[arg-type]
        chosen = log_probs[rows][mask[rows]]
        policy = lambda *_, answer=chosen: (answer, torch.zeros(len(answer)), None)  # noqa: E731
        loss, _ = micro_loss(policy, work, micro, coefficients, algorithm, LEVELS)  # type: ignore[arg-type]
        loss.backward()
        total += loss.item()
    return total, log_probs.grad


class Inputs:
    """What a policy would be asked."""

    input_ids = rows_N = columns_N = targets_N = None


def settings(loss: str, correction: str = "none", proximal: str = "recompute") -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"loss": {"name": "dro", "beta": 0.3} if loss == "dro" else loss, "correction": correction, "proximal": proximal}
    )


def expected(batch: Batch, loss: str, correction: str, proximal: str = "recompute") -> tuple[float, Any]:
    prox = batch.proximal
    if proximal == "behave":
        prox = batch.behaviour
    elif proximal == "loglinear":
        alpha = np.where(batch.staleness > 0, (batch.staleness - 1) / np.maximum(batch.staleness, 1), 0.0)
        prox = batch.behaviour + alpha * (batch.log_probs - batch.behaviour)
    weights = np.ones(batch.mask.shape)
    if correction != "none":
        ratios = reference_corrections.ratios(batch.log_probs if loss in NO_RATIO else prox, batch.behaviour)
        weights, _ = getattr(reference_corrections, correction)(ratios, batch.staleness, batch.mask)
    weights = np.where(batch.mask, weights, 1.0)
    values, slope = getattr(reference_losses, loss)(
        batch.log_probs, prox, batch.behaviour, batch.advantages, weights, batch.mask, **({"beta": 0.3} if loss == "dro" else {})
    )
    return reference_losses.aggregated(values, slope, batch.mask, entries_of(Loss)[loss].model_fields["aggregation"].default)


@pytest.mark.parametrize("cuts", [1, 3, 7])
@pytest.mark.parametrize(
    ("loss", "correction"),
    [(loss, correction) for loss in LOSSES for correction in (["none"] if loss in BEHAVIOUR else CORRECTIONS)],
)
def test_every_loss_and_correction_that_a_file_can_name_equals_its_formula_for_any_cut(loss, correction, cuts):
    batch = batch_for(loss)
    value, slope = gradient(batch, settings(loss, correction), cuts)
    expected_value, expected_slope = expected(batch, loss, correction)
    assert value == pytest.approx(expected_value, abs=1e-10)
    np.testing.assert_allclose(slope, expected_slope, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES)
def test_with_loglinear_the_anchor_goes_by_each_token_s_staleness(loss):
    batch, correction = batch_for(loss), "none" if loss in BEHAVIOUR else "token_tis"
    value, slope = gradient(batch, settings(loss, correction, "loglinear"))
    expected_value, expected_slope = expected(batch, loss, correction, "loglinear")
    assert value == pytest.approx(expected_value, abs=1e-10)
    np.testing.assert_allclose(slope, expected_slope, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES)
def test_with_behave_the_anchor_is_the_behaviour_policy(loss):
    batch = batch_for(loss)
    value, slope = gradient(batch, settings(loss, "none", "behave"))
    expected_value, expected_slope = expected(batch, loss, "none", "behave")
    assert value == pytest.approx(expected_value, abs=1e-10)
    np.testing.assert_allclose(slope, expected_slope, atol=1e-10)
