"""Corrections, proximal policies and the report, against formulas written out in numpy, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.algorithms.corrections import CorrectionInputs, correct, importance_ratio
from asyncrl.algorithms.proximal import PROXIMALS, ProximalInputs
from asyncrl.algorithms.reports import correction_metrics, correction_sums
from asyncrl.config.entries import NoCorrection, StalenessTis, TokenTis

RATIO = torch.tensor([[0.2, 1.0, 1.4, 1.6, 2.5, 9.0]], dtype=torch.float64)
STALENESS = torch.tensor([[0, 1, 1, 1, 0, 3]])
MASK = torch.ones(1, 6, dtype=torch.bool)


def corrected(entry):
    return correct(entry, CorrectionInputs(RATIO, STALENESS, MASK))


def test_none_means_no_weight_and_no_mask():
    result = corrected(NoCorrection())
    assert result.weights_BT.tolist() == [[1.0] * 6]
    assert result.mask_BT is MASK


def test_token_tis_caps_each_weight():
    result = corrected(TokenTis())
    assert result.weights_BT[0].tolist() == [0.2, 1.0, 1.4, 1.6, 2.0, 2.0]
    assert result.flags["truncated"][0].tolist() == [False, False, False, False, True, True]


def test_staleness_tis_trusts_older_tokens_less():
    result = corrected(StalenessTis())
    assert result.weights_BT[0].tolist() == pytest.approx([0.2, 1.0, 1.4, 1.5, 2.0, 1.125])
    assert result.flags["truncated"][0].tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize(("cap", "decay"), [(2.0, 0.5), (5.0, 0.9), (1.0, 0.0), (3.0, 1.0), (3.0, 0.0)])
def test_staleness_tis_matches_its_formula(cap, decay):
    random = np.random.default_rng(0)
    ratio, staleness = np.exp(random.normal(size=(4, 9))), random.integers(0, 5, (4, 9))
    inputs = CorrectionInputs(torch.tensor(ratio), torch.tensor(staleness), torch.ones(4, 9, dtype=torch.bool))
    expected = np.minimum(ratio, 1 + (cap - 1) * decay ** staleness.astype(float))
    np.testing.assert_allclose(correct(StalenessTis(cap=cap, decay=decay), inputs).weights_BT.numpy(), expected, atol=1e-12)


def test_the_ratio_is_proximal_over_behaviour_without_gradient():
    proximal = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    ratio = importance_ratio(proximal, torch.tensor([[-2.0, -1.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool))
    assert ratio[0].tolist() == pytest.approx([np.e, 1 / np.e])
    assert not ratio.requires_grad


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_the_ratio_of_a_masked_position_is_one(poison):
    behaviour = torch.tensor([[poison, -1.0]], dtype=torch.float64)
    ratio = importance_ratio(torch.full_like(behaviour, -1.0), behaviour, torch.tensor([[False, True]]))
    assert ratio.tolist() == [[1.0, 1.0]]


def test_log_ratios_are_clamped_at_twenty():
    behaviour = torch.tensor([[-100.0, 0.0]], dtype=torch.float64)
    ratio = importance_ratio(torch.tensor([[0.0, -100.0]], dtype=torch.float64), behaviour, torch.ones(1, 2, dtype=torch.bool))
    assert ratio[0].log().tolist() == pytest.approx([20.0, -20.0])


def test_behave_makes_every_weight_one():
    behaviour, current = torch.tensor([[-1.0]]), torch.tensor([[-3.0]])
    anchor = PROXIMALS["behave"].log_probs(ProximalInputs(behaviour, current, None, torch.zeros(1, 1, dtype=torch.int64)))
    assert importance_ratio(anchor, behaviour, torch.ones(1, 1, dtype=torch.bool)).item() == 1.0


def test_recompute_is_the_policy_before_the_first_update():
    behaviour, current, before = torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([[-2.0]])
    level = torch.zeros(1, 1, dtype=torch.int64)
    assert PROXIMALS["recompute"].log_probs(ProximalInputs(behaviour, current, before, level)) is before
    assert PROXIMALS["recompute"].log_probs(ProximalInputs(behaviour, current, None, level)) is current


def report(seed: int, cuts: int = 1) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    shape = (6, 8)
    behaviour, mask = -random.exponential(size=shape), random.random(shape) < 0.6
    proximal, staleness = behaviour + random.normal(scale=0.4, size=shape), random.integers(0, 3, shape)
    ratio = np.exp(proximal - behaviour)
    truncated = (ratio > 1.2) & mask
    behaviour_poisoned = np.where(mask, behaviour, np.nan)
    pieces = [
        correction_sums(
            ratio_BT=torch.tensor(ratio[rows]),
            behaviour_BT=torch.tensor(behaviour_poisoned[rows]),
            proximal_BT=torch.tensor(proximal[rows]),
            staleness_BT=torch.tensor(staleness[rows]),
            mask_BT=torch.tensor(mask[rows]),
            flags={"truncated": torch.tensor(truncated[rows])},
            levels=4,
        )
        for rows in np.array_split(np.arange(6), cuts)
    ]
    metrics = correction_metrics(
        torch.stack([sums for sums, _ in pieces]).sum(0), torch.stack([largest for _, largest in pieces]).amax(0)
    )
    values = {"ratio": ratio, "behaviour": behaviour, "proximal": proximal, "staleness": staleness, "mask": mask}
    return metrics, {**values, "truncated": truncated}


@pytest.mark.parametrize("level", [None, 0, 1, 2])
def test_the_report_matches_its_formulas_in_all_and_by_staleness(level):
    metrics, values = report(0)
    chosen = values["mask"] & (True if level is None else values["staleness"] == level)
    ratio, behaviour, proximal = (values[name][chosen] for name in ("ratio", "behaviour", "proximal"))
    expected = {
        "weight_mean": ratio.mean(),
        "weight_std": ratio.std(),
        "weight_max": ratio.max(),
        "effective_sample_size": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "truncated": values["truncated"][chosen].mean(),
        "kl": (ratio - 1 - np.log(ratio)).mean(),
        "kl_k1": (behaviour - proximal).mean(),
        "chi2": (ratio**2).mean() - 1,
        "perplexity_behaviour": np.exp(-behaviour.mean()),
        "perplexity_proximal": np.exp(-proximal.mean()),
        "tokens": len(ratio),
    }
    prefix = "correction/" if level is None else f"correction/staleness_{level}/"
    assert {name: metrics[prefix + name] for name in expected} == pytest.approx(expected)


def test_the_report_is_the_same_for_any_cut():
    assert report(1, cuts=4)[0] == pytest.approx(report(1)[0])


def test_a_level_without_a_token_is_not_reported():
    assert not any("staleness_3" in name for name in report(0)[0])
