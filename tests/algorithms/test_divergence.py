"""KL estimators, the adaptive coefficient, the value loss, proximal policies and the length penalty, against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms import kl
from asyncrl.algorithms.corrections import CorrectionInputs
from asyncrl.algorithms.divergence import ESTIMATORS, adapted_coefficient, mean_kl, value_loss
from asyncrl.algorithms.proximal import PROXIMALS, ProximalInputs
from asyncrl.algorithms.shaping import overlong_penalty
from asyncrl.config.entries import AdaptiveKl
from tests.algorithms import reference_losses as reference
from tests.algorithms.batches import DTYPES, TOLERANCE, random_batch, tensor

ALL = [name + plus for name in ESTIMATORS for plus in ("", "+")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("estimator", ALL)
def test_value_and_gradient_of_a_kl_estimator_equal_the_formula(estimator, spread, dtype):
    batch = random_batch(0, spread=spread).at(dtype)
    log_probs = tensor(batch.log_probs, dtype).requires_grad_()
    found = kl(estimator, log_probs, tensor(batch.proximal, dtype))
    found.sum().backward()
    value, slope = reference.kl(estimator, batch.log_probs, batch.proximal)
    np.testing.assert_allclose(found.detach().double(), value, **TOLERANCE[dtype])
    np.testing.assert_allclose(log_probs.grad.double(), slope, **TOLERANCE[dtype])


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("reference_log_prob", [0.0, -60.0])
def test_a_kl_estimator_is_clamped_at_twenty(estimator, reference_log_prob):
    log_probs = torch.tensor([[-30.0]], dtype=torch.float64, requires_grad=True)
    found = kl(estimator, log_probs, torch.tensor([[reference_log_prob]], dtype=torch.float64))
    found.sum().backward()
    value, slope = reference.kl(estimator, np.array([[-30.0]]), np.array([[reference_log_prob]]))
    assert found.item() == pytest.approx(value.item())
    assert log_probs.grad.item() == slope.item() == 0.0


def test_no_gradient_flows_to_the_reference():
    anchor = torch.tensor([[-1.0]], requires_grad=True)
    kl("k3+", torch.tensor([[-2.0]], requires_grad=True), anchor).sum().backward()
    assert anchor.grad is None


def test_the_mean_divergence_is_that_of_per_response_means():
    values = torch.tensor([[1.0, 3.0], [10.0, torch.nan], [torch.inf, 5.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert mean_kl(values, mask).item() == pytest.approx((2 + 10) / 2)
    assert mean_kl(values, torch.zeros_like(mask)).item() == 0.0


@pytest.mark.parametrize(("kl_now", "factor"), [(0.1, 1.0), (0.11, 1.001), (0.5, 1.002), (0.0, 0.998), (0.095, 0.9995)])
def test_the_adaptive_coefficient_moves_by_a_fifth_of_responses_over_horizon_at_most(kl_now, factor):
    found = adapted_coefficient(0.5, AdaptiveKl(target=0.1, horizon=10_000.0), kl=kl_now, responses=100)
    assert found == pytest.approx(0.5 * factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_value_loss_equals_its_formula(dtype):
    batch = random_batch(3).at(dtype)
    values = tensor(batch.poisoned(np.nan).values, dtype).requires_grad_()
    old, returns = tensor(batch.poisoned(np.inf).advantages, dtype), tensor(batch.log_probs, dtype)
    found = value_loss(values, old, returns, tensor(batch.mask))
    found.sum().backward()
    V, V_old, R = batch.values, batch.advantages, batch.log_probs
    near = np.clip(V, V_old - 0.5, V_old + 0.5)
    free = (near - R) ** 2 <= (V - R) ** 2
    expected = np.where(batch.mask, np.maximum((V - R) ** 2, (near - R) ** 2) / 2, 0)
    slope = np.where(batch.mask & free, V - R, 0) + np.where(batch.mask & ~free & (near == V), V - R, 0)
    np.testing.assert_allclose(found.detach().double(), expected, **TOLERANCE[dtype])
    np.testing.assert_allclose(values.grad.double(), slope, **TOLERANCE[dtype])


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.125), (90, -0.25), (100, -0.5)])
def test_the_length_penalty_falls_over_the_buffer(length, penalty):
    lengths = torch.tensor([length])
    assert overlong_penalty(lengths, max_response_tokens=100, buffer_tokens=20, factor=0.5).item() == pytest.approx(penalty)


def test_behave_makes_every_weight_one():
    behaviour, current = torch.tensor([[-1.0]]), torch.tensor([[-3.0]])
    anchor = PROXIMALS["behave"].log_probs(ProximalInputs(behaviour, current, None, torch.zeros(1, 1, dtype=torch.int64)))
    inputs = CorrectionInputs.of(anchor, behaviour, torch.zeros(1, 1).long(), torch.ones(1, 1, dtype=torch.bool))
    assert inputs.ratio_BT.item() == 1.0


def test_recompute_is_the_policy_before_the_first_update():
    behaviour, current, before = torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([[-2.0]])
    level = torch.zeros(1, 1, dtype=torch.int64)
    assert PROXIMALS["recompute"].log_probs(ProximalInputs(behaviour, current, before, level)) is before
    assert PROXIMALS["recompute"].log_probs(ProximalInputs(behaviour, current, None, level)) is current


@given(behaviour=st.floats(-30, 0), current=st.floats(-30, 0), staleness=st.integers(0, 100))
def test_loglinear_lies_between_the_two_by_the_token_s_staleness(behaviour, current, staleness):
    as_tensor = lambda value: torch.tensor([[value]], dtype=torch.float64)  # noqa: E731
    inputs = ProximalInputs(as_tensor(behaviour), as_tensor(current), None, torch.tensor([[staleness]]))
    alpha = (staleness - 1) / staleness if staleness else 0.0
    expected = behaviour + alpha * (current - behaviour)
    assert PROXIMALS["loglinear"].log_probs(inputs).item() == pytest.approx(expected, abs=1e-12)
