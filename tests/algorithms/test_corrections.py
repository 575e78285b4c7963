"""Every importance correction against its formula in numpy, by itself and with a veto."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import correction
from asyncrl.algorithms.corrections import CORRECTIONS, CorrectionInputs, correct, denominator_mask
from asyncrl.config.entries import General, NoCorrection, Rejection, SeqMis, StalenessTis, TokenTis
from tests.algorithms import reference_corrections as reference
from tests.algorithms.batches import DTYPES, TOLERANCE, random_batch, tensor

REJECTIONS = [
    {"by": "token", "figure": "k1", "low": 0.6, "high": 1.8},
    {"by": "token", "figure": "k2", "high": 0.05},
    {"by": "token", "figure": "k3", "high": 0.05},
    {"by": "seq_sum", "figure": "k1", "low": 0.5, "high": 2.0},
    {"by": "seq_sum", "figure": "k2", "high": 0.2},
    {"by": "seq_sum", "figure": "k3", "high": 0.2},
    {"by": "seq_mean", "figure": "k1", "low": 0.9, "high": 1.1},
    {"by": "seq_mean", "figure": "k2", "high": 0.05},
    {"by": "seq_mean", "figure": "k3", "low": 0.001, "high": 0.05},
    {"by": "seq_max", "figure": "k2", "high": 0.1},
    {"by": "seq_max", "figure": "k3", "high": 0.1},
]
CASES = [
    ("token_tis", {}),
    ("token_tis", {"cap": 1.1}),
    ("staleness_tis", {}),
    ("staleness_tis", {"cap": 1.5, "decay": 0.0}),
    ("staleness_tis", {"cap": 3.0, "decay": 1.0}),
    ("segment_tis", {}),
    ("segment_tis", {"cap": 1.1}),
    ("seq_tis", {}),
    ("token_icepop", {}),
    ("token_icepop", {"low": 0.9, "high": 1.2}),
    ("seq_mis", {}),
    ("seq_mis", {"low": 0.1, "high": 9.0, "cap": 1.5}),
    ("geo_mis", {"low": 0.9, "high": 1.1}),
    ("geo_mis_token_tis", {"low": 0.9, "high": 1.1, "cap": 1.1}),
    ("geo_mis_seq_tis", {"low": 0.9, "high": 1.1}),
    ("geo_mis", {}),
    ("k3_mask", {"high": 0.04}),
    ("k3_mask_token_tis", {"high": 0.04, "cap": 1.1}),
    ("k3_mask_seq_tis", {"high": 0.04}),
    ("k3_mask", {}),
    ("veto", {"floor": 0.6}),
    *(("general", {"level": level, "cap": 1.2}) for level in ("token", "segment", "sequence", "geometric")),
    *(
        ("general", {"level": level, "treatment": "band", "low": 0.8, "high": 1.3})
        for level in ("token", "segment", "sequence", "geometric")
    ),
    *(("general", {"reject": [rule]}) for rule in REJECTIONS),
    ("general", {"reject": [REJECTIONS[0], REJECTIONS[3]], "level": "sequence"}),
    ("general", {"batch_normalize": True, "treatment": "band", "low": 0.8, "high": 1.3}),
    ("general", {"batch_normalize": True, "reject": [REJECTIONS[4]]}),
]
NAN = float("nan")


def found(name, batch, dtype=torch.float64, **params):
    return correction(
        {"name": name, **params},
        proximal_log_probs=tensor(batch.proximal, dtype),
        behaviour_log_probs=tensor(batch.behaviour, dtype),
        mask=tensor(batch.mask),
        token_staleness=tensor(batch.staleness),
    )


def expected(name, batch, **params):
    return getattr(reference, name)(reference.ratios(batch.proximal, batch.behaviour), batch.staleness, batch.mask, **params)


def inputs(ratios, staleness=None, mask=None):
    ratio = torch.tensor(ratios, dtype=torch.float64)
    staleness = torch.zeros(ratio.shape, dtype=torch.int64) if staleness is None else torch.tensor(staleness)
    return CorrectionInputs(
        ratio.log(), staleness, torch.ones(ratio.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    )


def test_every_correction_is_held_against_its_formula():
    assert {name for name, _ in CASES} | {"none"} == set(CORRECTIONS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_weights_and_mask_equal_the_formula(name, params, seed, dtype):
    batch = random_batch(seed, groups=8, spread=0.3).at(dtype)
    weights, mask, _ = found(name, batch, dtype, **params)
    expected_weights, kept = expected(name, batch, **params)
    assert np.array_equal(mask, kept)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights.double(), expected_weights, **TOLERANCE[dtype])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "params"), [case for case in CASES if case[0] != "veto" and "batch_normalize" not in case[1]])
def test_a_veto_combines_with_any_other(name, params, seed):
    batch = random_batch(seed, groups=8, spread=0.3)
    weights, mask, metrics = found(name, batch, veto=0.7, **params)
    ratios = reference.ratios(batch.proximal, batch.behaviour)
    expected_weights, kept = reference.with_veto(*expected(name, batch, **params), ratios, batch.mask, 0.7)
    assert np.array_equal(mask, kept)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-12)
    assert metrics["correction/vetoed"] > 0


@pytest.mark.parametrize("value", [0.3, 1.0])
def test_none_means_no_weight_and_no_mask(value):
    given_inputs = inputs([[value, 9.0]])
    result = correct(NoCorrection(), given_inputs)
    assert result.weights_BT.tolist() == [[1.0, 1.0]]
    assert result.mask_BT is given_inputs.mask_BT


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), shuffle=st.randoms(use_true_random=False), case=st.sampled_from(CASES))
def test_the_order_of_responses_does_not_matter(seed, shuffle, case):
    name, params = case
    batch = random_batch(seed, spread=0.3)
    order = list(range(len(batch.rewards)))
    shuffle.shuffle(order)
    weights, mask, _ = found(name, batch, **params)
    other, other_mask, _ = found(name, batch.rows(order), **params)
    assert torch.equal(mask[order], other_mask)
    np.testing.assert_allclose(other, weights[order], atol=1e-12)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), case=st.sampled_from(CASES), poison=st.sampled_from([NAN, np.inf, -np.inf, 1e300]))
def test_masked_positions_change_nothing(seed, case, poison):
    name, params = case
    batch = random_batch(seed, spread=0.3)
    seen = batch.poisoned(poison)
    seen.staleness[~batch.mask] = 2**40
    weights, mask, metrics = found(name, batch, **params)
    other, other_mask, other_metrics = found(name, seen, **params)
    assert torch.equal(weights, other)
    assert torch.equal(mask, other_mask)
    assert metrics == other_metrics


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_ratios_of_one_weigh_one_and_drop_nothing(name, params):
    batch = random_batch(1)
    batch.behaviour[:] = batch.proximal
    params = {key: value for key, value in params.items() if key != "reject"}
    weights, mask, _ = found(name, batch, **params)
    assert np.array_equal(mask, batch.mask)
    assert torch.equal(weights[mask], torch.ones(int(mask.sum()), dtype=torch.float64))


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_no_trainable_token_is_an_ordinary_input(name, params):
    batch = random_batch(1)
    batch.mask[:] = False
    weights, mask, metrics = found(name, batch.poisoned(NAN), **params)
    assert not mask.any()
    assert torch.count_nonzero(weights) == 0
    assert metrics == {}


def test_token_tis_and_staleness_tis_by_hand():
    ratios, staleness = [[0.2, 1.0, 1.4, 1.6, 2.5, 9.0]], [[0, 1, 1, 1, 0, 3]]
    capped = correct(TokenTis(), inputs(ratios, staleness))
    assert capped.weights_BT[0].tolist() == pytest.approx([0.2, 1.0, 1.4, 1.6, 2.0, 2.0])
    assert capped.flags["truncated"][0].tolist() == [False, False, False, False, True, True]
    tighter = correct(StalenessTis(), inputs(ratios, staleness))
    assert tighter.weights_BT[0].tolist() == pytest.approx([0.2, 1.0, 1.4, 1.5, 2.0, 1.125])
    assert tighter.flags["truncated"][0].tolist() == [False, False, False, True, True, True]


def test_a_segment_is_a_run_of_one_version_with_masked_tokens_skipped():
    weights, _, _ = correction(
        {"name": "segment_tis", "cap": 100.0},
        proximal_log_probs=torch.tensor([[2.0, 3.0, 7.0, 5.0, 1.5, 2.0]], dtype=torch.float64).log(),
        behaviour_log_probs=torch.zeros(1, 6, dtype=torch.float64),
        mask=torch.tensor([[1, 1, 0, 1, 1, 1]]),
        token_staleness=torch.tensor([[2, 2, 0, 2, 1, 2]]),
    )
    np.testing.assert_allclose(weights, [[30.0, 30.0, 0.0, 30.0, 1.5, 2.0]])


def test_bounds_are_inclusive_and_on_the_ratio_itself():
    dropped = correct(SeqMis(), inputs([[0.5, 1.0], [2.0, 1.0], [0.49, 1.0], [2.1, 1.0]]))
    assert dropped.mask_BT[:, 0].tolist() == [True, True, False, False]
    assert dropped.flags["dropped"][:, 0].tolist() == [False, False, True, True]


def test_the_denominator_counts_what_stays_unless_told_otherwise():
    values = inputs([[1.0, 1.0], [9.0, 9.0]])
    dropped = correct(SeqMis(), values)
    assert denominator_mask(SeqMis(), values.mask_BT, dropped).sum() == 2
    assert denominator_mask(SeqMis(denominator="all"), values.mask_BT, dropped).sum() == 4


@pytest.mark.parametrize(
    ("entry", "whole"),
    [
        (TokenTis(), False),
        (TokenTis(veto=1e-4), True),
        (SeqMis(), True),
        (General(), False),
        (General(batch_normalize=True), True),
        (General(reject=[Rejection(by="token", figure="k2", high=1.0)]), True),
    ],
)
def test_what_drops_or_normalises_says_that_it_needs_the_whole_mini_batch(entry, whole):
    assert entry.needs.mini_batch == whole
    assert ("loglinear" in entry.needs.proximals) == (not whole)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), case=st.sampled_from([case for case in CASES if "batch_normalize" not in case[1]]))
def test_responses_are_corrected_one_by_one(seed, case):
    name, params = case
    batch = random_batch(seed, spread=0.3)
    weights, mask, _ = found(name, batch, **params)
    for rows in np.array_split(np.arange(len(batch.rewards)), 3):
        part, part_mask, _ = found(name, batch.rows(rows), **params)
        np.testing.assert_allclose(part, weights[rows], atol=1e-12)
        assert torch.equal(part_mask, mask[rows])


def test_the_ratio_is_proximal_over_behaviour_without_gradient():
    proximal = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([[-2.0, -1.0]], dtype=torch.float64)
    ratio = CorrectionInputs.of(proximal, behaviour, torch.zeros(1, 2).long(), torch.ones(1, 2, dtype=torch.bool)).ratio_BT
    assert ratio[0].tolist() == pytest.approx([np.e, 1 / np.e])
    assert not ratio.requires_grad


def test_log_ratios_and_their_sums_are_clamped_at_twenty():
    far = torch.tensor([[0.0, 0.0], [-100.0, -100.0]], dtype=torch.float64)
    values = CorrectionInputs.of(far, far.flip(0), torch.zeros(2, 2).long(), torch.ones(2, 2, dtype=torch.bool))
    assert values.log_ratio_BT[:, 0].tolist() == [20.0, -20.0]
    both = correct(General(level="sequence", cap=1e12), values)
    assert both.weights_BT.log()[:, 0].tolist() == pytest.approx([20.0, -20.0])
