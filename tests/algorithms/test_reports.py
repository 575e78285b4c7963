"""What is reported of a correction, against formulas written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.algorithms.reports import correction_metrics, correction_sums


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
