"""Policy losses and aggregation against formulas written out in numpy, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.algorithms.aggregation import response_coefficients
from asyncrl.algorithms.losses import LossInputs, token_loss
from asyncrl.config.entries import PpoClip


def inputs(seed: int = 0, **changes: object) -> LossInputs:
    random = np.random.default_rng(seed)
    draw = lambda scale: torch.tensor(random.normal(scale=scale, size=(5, 7)))  # noqa: E731
    log_probs = draw(1.0)
    values = {
        "log_probs_BT": log_probs,
        "proximal_BT": log_probs + draw(0.6),
        "behaviour_BT": log_probs + draw(0.6),
        "advantages_BT": draw(1.0),
        "weights_BT": draw(0.3).exp(),
        "mask_BT": torch.tensor(random.random((5, 7)) < 0.7),
    }
    return LossInputs(**{**values, **changes})


def one(log_ratio: float, advantage: float, entry: PpoClip, weight: float = 1.0) -> tuple[float, float, list[str]]:
    """(loss, gradient with respect to the log-prob, flags) of a single token."""
    log_probs = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    anchor = torch.zeros(1, 1, dtype=torch.float64)
    values = LossInputs(log_probs, anchor, anchor, anchor + advantage, anchor + weight, torch.ones(1, 1, dtype=torch.bool))
    loss = token_loss(entry, values)
    loss.values_BT.sum().backward()
    return loss.values_BT.item(), log_probs.grad.item(), [name for name, flag in loss.flags.items() if flag.any()]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dual_clip", [3.0, 1.5, None])
def test_ppo_clip_matches_its_formula(seed, dual_clip):
    entry = PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    values = inputs(seed)
    found = token_loss(entry, values).values_BT.numpy()
    advantage, ratio = values.advantages_BT.numpy(), np.exp((values.log_probs_BT - values.proximal_BT).numpy())
    expected = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.28))
    if dual_clip is not None:
        expected = np.where(advantage < 0, np.minimum(expected, -advantage * dual_clip), expected)
    expected = np.where(values.mask_BT.numpy(), expected * values.weights_BT.numpy(), 0)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_ppo_clip_by_hand():
    entry = PpoClip()
    double = float(np.log(2.0))
    assert one(0.0, 2.0, entry) == (pytest.approx(-2.0), pytest.approx(-2.0), [])
    assert one(double, 1.0, entry) == (pytest.approx(-1.28), 0.0, ["clipped_high"])
    assert one(double, -1.0, entry) == (pytest.approx(2.0), pytest.approx(2.0), [])
    assert one(-double, -1.0, entry) == (pytest.approx(0.8), 0.0, ["clipped_low"])
    assert one(2 * double, -1.0, entry) == (pytest.approx(3.0), 0.0, ["dual_clipped"])
    assert one(2 * double, -1.0, PpoClip(dual_clip=None)) == (pytest.approx(4.0), pytest.approx(4.0), [])


def test_the_weight_multiplies_value_and_gradient():
    loss, gradient, _ = one(0.1, 1.0, PpoClip(), weight=0.5)
    whole, whole_gradient, _ = one(0.1, 1.0, PpoClip())
    assert (loss, gradient) == (pytest.approx(whole / 2), pytest.approx(whole_gradient / 2))


def test_a_huge_ratio_is_clamped_and_finite():
    loss, gradient, _ = one(500.0, -1.0, PpoClip(dual_clip=None))
    assert loss == pytest.approx(np.exp(20.0))
    assert gradient == 0.0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_a_masked_position_holds_changes_neither_loss_nor_gradient(poison):
    clean = inputs(3)
    names = ("log_probs_BT", "proximal_BT", "behaviour_BT", "advantages_BT", "weights_BT")
    poisoned = {name: torch.where(clean.mask_BT, getattr(clean, name), poison) for name in names}
    results = []
    for values in ({name: getattr(clean, name) for name in names}, poisoned):
        log_probs = values["log_probs_BT"].clone().requires_grad_()
        loss = token_loss(PpoClip(), LossInputs(**{**values, "log_probs_BT": log_probs}, mask_BT=clean.mask_BT))
        loss.values_BT.sum().backward()
        results.append((loss.values_BT.detach(), log_probs.grad, {name: flag.sum() for name, flag in loss.flags.items()}))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


LENGTHS = [3, 0, 1, 4]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 8, 0, 1 / 8, 1 / 8]),
        ("token_sum", [1, 0, 1, 1]),
        ("seq_mean_token_sum", [1 / 3, 0, 1 / 3, 1 / 3]),
        ("seq_mean_token_mean", [1 / 9, 0, 1 / 3, 1 / 12]),
        ("seq_mean_token_sum_norm", [1 / 30, 0, 1 / 30, 1 / 30]),
    ],
)
def test_aggregations_by_hand(aggregation, expected):
    found = response_coefficients(aggregation, torch.tensor(LENGTHS), max_response_tokens=10)
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"])
def test_a_batch_without_a_trainable_token_has_no_coefficient(aggregation):
    assert response_coefficients(aggregation, torch.tensor([0, 0]), max_response_tokens=4).tolist() == [0.0, 0.0]
