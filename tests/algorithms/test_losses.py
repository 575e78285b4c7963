"""Every policy loss and aggregation, values and gradients, against formulas and closed-form gradients in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import correction as public_correction
from asyncrl.algorithms import policy_loss
from asyncrl.algorithms.aggregation import AGGREGATIONS, response_coefficients
from asyncrl.algorithms.corrections import CorrectionInputs, correct, denominator_mask
from asyncrl.algorithms.losses import LOSSES, LossInputs, MiniBatch, select, token_loss
from asyncrl.config.entries import ClipCov, Correction, KlCov, Loss, M2po, PpoClip, entries_of
from tests.algorithms import reference_losses as reference
from tests.algorithms.batches import DTYPES, TOLERANCE, random_batch, tensor

NAN = float("nan")
ENTRIES = entries_of(Loss)
STOPPED = ("cispo", "gspo", "dppo_tv", "dppo_kl", "topr", "reinforce", "gpg")  # or with no ratio whose slope could be wrong
WEIGHTLESS = ("dppo_tv", "dppo_kl", "dro", "topr", "m2po")
OUTCOME = ("gmpo",)
CASES = [
    ("ppo_clip", {}),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": None}),
    ("ppo_clip", {"dual_clip": 1.3}),
    ("cispo", {}),
    ("cispo", {"cap": 1.2, "low": 0.7}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("gmpo", {}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 2.0}),
    ("sapo", {}),
    ("sapo", {"tau": 2.0, "tau_negative": 3.0}),
    ("dppo_tv", {}),
    ("dppo_tv", {"delta": 0.02, "cap": 1.1}),
    ("dppo_kl", {}),
    ("dppo_kl", {"delta": 0.005, "cap": 1.1}),
    ("clip_cov", {"low": 0.1}),
    ("clip_cov", {"low": 0.01, "ratio": 0.2, "seed": 5}),
    ("kl_cov", {}),
    ("kl_cov", {"ratio": 0.3, "coef": 0.5}),
    ("dro", {"beta": 0.3}),
    ("topr", {}),
    ("topr", {"cap": 2.0}),
    ("m2po", {}),
    ("m2po", {"tau": 0.2}),
    ("reinforce", {}),
    ("gpg", {}),
]


def weights_of(name, batch):
    return np.ones(batch.mask.shape) if name in WEIGHTLESS else np.exp(np.clip(batch.proximal - batch.behaviour, -1, 0.7))


def advantages_of(name, batch):
    return np.broadcast_to(batch.advantages[:, :1], batch.mask.shape) if name in OUTCOME else batch.advantages


def found(name, batch, dtype=torch.float64, *, poison=None, rows=slice(None), **params):
    """(loss, gradient [B, T], metrics) of the public call; `poison` stands at masked positions."""
    seen = batch if poison is None else batch.poisoned(poison)
    weights, advantages = weights_of(name, batch), advantages_of(name, batch)
    if poison is not None:
        weights, advantages = (np.where(batch.mask, values, poison) for values in (weights, advantages))
    log_probs = tensor(seen.log_probs[rows], dtype).requires_grad_()
    loss, metrics = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=tensor(seen.proximal[rows], dtype),
        behaviour_log_probs=tensor(seen.behaviour[rows], dtype),
        advantages=tensor(advantages[rows], dtype),
        weights=None if name in WEIGHTLESS else tensor(weights[rows], dtype),
        mask=tensor(batch.mask[rows]),
        sample_ids=tensor(batch.ids[rows]),
        **params,
    )
    loss.backward()
    return loss.detach(), log_probs.grad, metrics


def expected(name, batch, aggregation=None, normalizer=None, weights=None, **params):
    extra = {"ids": batch.ids} if name == "clip_cov" else {}
    weights = weights_of(name, batch) if weights is None else weights
    values, gradient = getattr(reference, name)(
        batch.log_probs, batch.proximal, batch.behaviour, advantages_of(name, batch), weights, batch.mask, **extra, **params
    )
    aggregation = aggregation or ENTRIES[name].model_fields["aggregation"].default
    return reference.aggregated(values, gradient, batch.mask, aggregation, normalizer)


def one(log_ratio: float, advantage: float, entry: PpoClip, weight: float = 1.0) -> tuple[float, float, list[str]]:
    """(loss, gradient with respect to the log-prob, flags) of a single token."""
    log_probs = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    anchor = torch.zeros(1, 1, dtype=torch.float64)
    values = LossInputs(log_probs, anchor, anchor, anchor + advantage, anchor + weight, torch.ones(1, 1, dtype=torch.bool))
    loss = token_loss(entry, values)
    loss.values_BT.sum().backward()
    return loss.values_BT.item(), log_probs.grad.item(), [name for name, flag in loss.flags.items() if flag.any()]


def test_every_loss_is_held_against_its_formula():
    assert {name for name, _ in CASES} == set(LOSSES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_value_and_gradient_equal_the_formula(name, params, seed, dtype):
    batch = random_batch(seed, spread=0.3).at(dtype)
    rounded = weights_of(name, batch).astype(np.float32 if dtype == torch.float32 else np.float64).astype(np.float64)
    loss, gradient, _ = found(name, batch, dtype, **params)
    value, slope = expected(name, batch, weights=rounded, **params)
    assert loss.dtype == dtype
    np.testing.assert_allclose(loss.double(), value, **TOLERANCE[dtype])
    np.testing.assert_allclose(gradient.double(), slope, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "kl_cov", "topr"])
def test_every_aggregation_equals_its_formula(name, aggregation, dtype):
    batch = random_batch(7, spread=0.3).at(dtype)
    loss, gradient, _ = found(name, batch, dtype, aggregation=aggregation)
    rounded = weights_of(name, batch).astype(np.float32 if dtype == torch.float32 else np.float64).astype(np.float64)
    value, slope = expected(name, batch, aggregation, weights=rounded)
    np.testing.assert_allclose(loss.double(), value, **TOLERANCE[dtype])
    np.testing.assert_allclose(gradient.double(), slope, **TOLERANCE[dtype])


@pytest.mark.parametrize(("name", "params"), [case for case in CASES if case[0] not in STOPPED], ids=str)
def test_the_closed_forms_are_the_slopes_of_their_values(name, params):
    """Of the reference itself, by central differences: where a value has no stopped gradient the closed form is its slope."""
    batch = random_batch(11, spread=0.3)
    extra = {"ids": batch.ids} if name == "clip_cov" else {}
    call = lambda lp: getattr(reference, name)(  # noqa: E731
        lp, batch.proximal, batch.behaviour, advantages_of(name, batch), weights_of(name, batch), batch.mask, **extra, **params
    )
    step, (_, slope) = 1e-6, call(batch.log_probs)
    for b, t in zip(*np.nonzero(batch.mask), strict=True):
        bump = np.zeros(batch.mask.shape)
        bump[b, t] = step
        ends = [np.where(batch.mask, call(batch.log_probs + sign * bump)[0], 0)[b].sum() for sign in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope[b, t], abs=1e-5)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), shuffle=st.randoms(use_true_random=False), case=st.sampled_from(CASES))
def test_the_order_of_responses_does_not_matter(seed, shuffle, case):
    name, params = case
    batch = random_batch(seed, spread=0.3)
    order = list(range(len(batch.rewards)))
    shuffle.shuffle(order)
    loss, gradient, _ = found(name, batch, **params)
    other, other_gradient, _ = found(name, batch, rows=order, **params)
    np.testing.assert_allclose(other, loss, atol=1e-10)
    np.testing.assert_allclose(other_gradient, gradient[order], atol=1e-10)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), case=st.sampled_from(CASES), poison=st.sampled_from([NAN, np.inf, -np.inf, 1e300]))
def test_masked_positions_change_neither_loss_nor_gradient(seed, case, poison):
    name, params = case
    batch = random_batch(seed, spread=0.3)
    loss, gradient, metrics = found(name, batch, **params)
    other, other_gradient, other_metrics = found(name, batch, poison=poison, **params)
    assert torch.equal(loss, other)
    assert torch.equal(gradient, other_gradient)
    assert metrics == other_metrics


@pytest.mark.parametrize("poison", [None, NAN])
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_a_fully_masked_batch_has_loss_and_gradient_zero(name, params, poison):
    batch = random_batch(2)
    batch.mask[:] = False
    loss, gradient, _ = found(name, batch, poison=poison, **params)
    assert loss == 0.0
    assert torch.count_nonzero(gradient) == 0


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), case=st.sampled_from(CASES), aggregation=st.sampled_from(AGGREGATIONS), data=st.data())
def test_any_cut_into_micro_batches_sums_to_the_same_loss_and_gradient(seed, case, aggregation, data):
    """As the trainer cuts: coefficients and selection from the whole mini-batch, token values from whole responses."""
    name, params = case
    batch = random_batch(seed, spread=0.3)
    aggregation = "seq_mean_token_mean" if name == "gmpo" else aggregation
    entry = ENTRIES[name].model_validate({**params, "aggregation": aggregation})
    whole, whole_gradient, _ = found(name, batch, aggregation=aggregation, **params)
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=20))
    ends = [end for end in np.cumsum(sizes) if end < len(batch.rewards)]
    fields = [batch.proximal, batch.behaviour, advantages_of(name, batch), weights_of(name, batch), batch.mask]
    proximal, behaviour, advantages, weights, mask = map(tensor, fields)
    chosen = select(entry, MiniBatch(proximal, behaviour, advantages, mask, tensor(batch.ids)))
    assert (chosen is not None) == entry.needs.mini_batch
    coefficients = response_coefficients(aggregation, mask.sum(1), max_response_tokens=mask.shape[1])
    loss, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
    for rows in np.split(np.arange(len(batch.rewards)), ends):
        width = max(1, int(np.flatnonzero(batch.mask[rows].any(0)).max(initial=0)) + 1)
        cut = lambda values: values[rows, :width]  # noqa: B023, E731
        log_probs = cut(tensor(batch.log_probs)).clone().requires_grad_()
        inputs = LossInputs(
            log_probs, *map(cut, (proximal, behaviour, advantages, weights, mask)), None if chosen is None else cut(chosen)
        )
        part = (token_loss(entry, inputs).values_BT * coefficients[rows, None]).sum()
        part.backward()
        loss += part.item()
        gradient[rows, :width] = log_probs.grad
    assert loss == pytest.approx(whole.item(), abs=1e-12)
    np.testing.assert_allclose(gradient, whole_gradient, atol=1e-12)


@pytest.mark.parametrize("denominator", ["kept", "all"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("correction", ["seq_mis", "k3_mask_token_tis", "veto"])
def test_with_dropped_responses_any_cut_sums_to_the_same_gradient(correction, aggregation, denominator):
    """The mini-batch is corrected as a whole; what stays gives the mask, what it says the denominator."""
    bounds = {"seq_mis": {}, "k3_mask_token_tis": {"high": 0.04}, "veto": {"floor": 0.7}}[correction]
    entry = entries_of(Correction)[correction].model_validate({"denominator": denominator, **bounds})
    batch = random_batch(3, groups=8, spread=0.3)
    mask, proximal, behaviour = tensor(batch.mask), tensor(batch.proximal), tensor(batch.behaviour)
    corrected = correct(entry, CorrectionInputs.of(proximal, behaviour, tensor(batch.staleness), mask))
    lengths = denominator_mask(entry, mask, corrected).sum(1)
    coefficients = response_coefficients(aggregation, lengths, max_response_tokens=mask.shape[1])
    results = []
    for cuts in (1, 2, 5, len(batch.mask)):
        log_probs = tensor(batch.log_probs).requires_grad_()
        for rows in np.array_split(np.arange(len(batch.mask)), cuts):
            fields = (log_probs, proximal, behaviour, tensor(batch.advantages), corrected.weights_BT, corrected.mask_BT)
            values = token_loss(PpoClip(), LossInputs(*(field[rows] for field in fields))).values_BT
            (values * coefficients[rows, None]).sum().backward()
        results.append(log_probs.grad)
    weights, kept, _ = public_correction(
        {"name": correction, **bounds}, proximal_log_probs=proximal, behaviour_log_probs=behaviour, mask=mask
    )
    assert 0 < kept.any(1).sum() < mask.any(1).sum()
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=1e-12)
    if denominator == "kept":
        log_probs = tensor(batch.log_probs).requires_grad_()
        policy_loss(
            "ppo_clip", log_probs=log_probs, old_log_probs=proximal, advantages=tensor(batch.advantages), mask=kept,
            weights=weights, aggregation=aggregation,
        )[0].backward()  # fmt: skip
        np.testing.assert_allclose(log_probs.grad, results[0], atol=1e-12)
    else:
        assert torch.count_nonzero(results[0][~kept]) == 0


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in (*WEIGHTLESS, "clip_cov", "kl_cov")])
def test_the_public_call_on_parts_adds_up_with_the_whole_batch_s_normalizer(name):
    batch = random_batch(4, spread=0.3)
    whole, whole_gradient, _ = found(name, batch)
    mean_of_tokens = ENTRIES[name].model_fields["aggregation"].default == "token_mean"
    count = batch.mask.sum() if mean_of_tokens else batch.mask.any(1).sum()
    parts = [found(name, batch, rows=rows, normalizer=int(count)) for rows in (slice(0, 5), slice(5, None))]
    np.testing.assert_allclose(sum(part[0] for part in parts), whole, atol=1e-12)
    np.testing.assert_allclose(torch.cat([part[1] for part in parts]), whole_gradient, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in WEIGHTLESS])
def test_weights_of_one_are_no_weights(name):
    batch = random_batch(6, spread=0.3)
    tensors = {
        "log_probs": tensor(batch.log_probs),
        "old_log_probs": tensor(batch.proximal),
        "advantages": tensor(advantages_of(name, batch)),
        "mask": tensor(batch.mask),
        "sample_ids": tensor(batch.ids),
    }
    bare, _ = policy_loss(name, **tensors)
    ones, _ = policy_loss(name, weights=torch.ones(batch.mask.shape), **tensors)
    assert bare == ones


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_one_token_responses_are_finite_and_as_specified(name, params):
    batch = random_batch(9, spread=0.3)
    batch.mask[:] = False
    batch.mask[:, 2] = True
    loss, gradient, _ = found(name, batch, **params)
    value, slope = expected(name, batch, **params)
    np.testing.assert_allclose(loss, value, atol=1e-10)
    np.testing.assert_allclose(gradient, slope, atol=1e-10)


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_log_ratios_and_their_sums_are_clamped_at_twenty(name, params, up):
    batch = random_batch(12, spread=0.3)
    for values in (batch.proximal, batch.behaviour) if up else (batch.log_probs,):
        values[:, :2] -= 25
    loss, gradient, _ = found(name, batch, **params)
    value, slope = expected(name, batch, **params)
    np.testing.assert_allclose(loss, value, rtol=1e-9)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_draw_of_clip_cov_is_that_of_the_hash(seed):
    batch = random_batch(seed, groups=30)
    ids = batch.ids - 20_000_000  # of either sign
    mini_batch = MiniBatch(*map(tensor, (batch.proximal, batch.behaviour, batch.advantages, batch.mask, ids)))
    entry = ClipCov(low=0.0, ratio=0.05, seed=2**63 - 1 - seed)
    chosen = reference.clip_cov_selection(batch.proximal, batch.advantages, batch.mask, ids, 0.0, 5.0, 0.05, entry.seed)
    assert chosen.sum() == int(0.05 * batch.mask.sum()) > 5
    assert np.array_equal(select(entry, mini_batch), chosen)


def test_fewer_eligible_tokens_than_the_quota_are_all_drawn_and_none_is_none():
    batch = random_batch(0)
    mini_batch = MiniBatch(*map(tensor, (batch.proximal, batch.behaviour, batch.advantages, batch.mask, batch.ids)))
    assert select(ClipCov(low=1e6, high=1e7), mini_batch).sum() == 0
    covariance = reference.covariances(batch.proximal, batch.advantages, batch.mask)
    assert select(ClipCov(ratio=1.0), mini_batch).sum() == ((covariance > 1) & (covariance < 5)).sum()


def test_equal_covariances_are_told_apart_by_sample_id_not_by_order():
    ones = torch.ones(6, 2, dtype=torch.float64)
    ids = torch.tensor([9, 4, 77, 3, 12, 5])
    chosen = select(KlCov(ratio=0.25), MiniBatch(ones, ones, ones, ones.bool(), ids))
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(select(KlCov(ratio=0.25), MiniBatch(ones, ones, ones, ones.bool(), ids[order])), chosen[order])
    assert chosen.sum() == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_m2po_removes_the_largest_until_the_mean_is_small_and_keeps_one(dtype):
    log_weight = torch.tensor([[0.1, -0.3, 0.5, -2.0, 0.0]], dtype=dtype)
    zeros, mask = torch.zeros(1, 5, dtype=dtype), torch.ones(1, 5, dtype=torch.bool)
    kept = select(M2po(), MiniBatch(log_weight, zeros, zeros, mask))
    assert kept.tolist() == [[True, True, False, False, True]]  # squares 0, 0.01, 0.09: mean 0.033; with 0.25 it is 0.0875
    alone = select(M2po(), MiniBatch(zeros - 3, zeros, zeros, mask))
    assert alone.sum() == 1


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


def test_a_token_that_is_certain_on_both_sides_is_inside_every_trust_region():
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    loss, metrics = policy_loss(
        "dppo_kl", log_probs=zeros.clone().requires_grad_(), old_log_probs=zeros, advantages=ones, mask=ones
    )
    assert torch.isfinite(loss)
    assert metrics["loss/outside"] == 0.0


def test_metrics_say_what_share_of_tokens_was_clipped():
    log_probs = torch.tensor([[-1.0, -1.0, -1.0, -9.0]], requires_grad=True)
    _, metrics = policy_loss(
        "ppo_clip",
        log_probs=log_probs,
        old_log_probs=torch.tensor([[-2.0, -1.0, -1.0, 0.0]]),
        advantages=torch.ones(1),
        mask=torch.tensor([[1, 1, 1, 0]]),
    )
    assert metrics["loss/clipped_high"] == pytest.approx(1 / 3)
    assert metrics["tokens"] == 3


LENGTHS = [3, 0, 1, 4]


@pytest.mark.parametrize(
    ("aggregation", "factors"),
    [
        ("token_mean", [1 / 8, 0, 1 / 8, 1 / 8]),
        ("token_sum", [1, 0, 1, 1]),
        ("seq_mean_token_sum", [1 / 3, 0, 1 / 3, 1 / 3]),
        ("seq_mean_token_mean", [1 / 9, 0, 1 / 3, 1 / 12]),
        ("seq_mean_token_sum_norm", [1 / 30, 0, 1 / 30, 1 / 30]),
    ],
)
def test_aggregations_by_hand(aggregation, factors):
    coefficients = response_coefficients(aggregation, torch.tensor(LENGTHS), max_response_tokens=10)
    assert coefficients.tolist() == pytest.approx(factors)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_a_trainable_token_has_no_coefficient(aggregation):
    assert response_coefficients(aggregation, torch.tensor([0, 0]), max_response_tokens=4).tolist() == [0.0, 0.0]
