"""Sampling: from one uniform number per (seed, position) to a token."""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.engines.embedded.sampling import sample, uniforms

V = 7


def draw(logits, count: int = 20_000, temperature: float = 1.0, **cuts):
    """Shares of each token over `count` seeds, and the log-probs reported."""
    logits_NV = torch.tensor(logits).expand(count, -1)
    uniform_N = torch.from_numpy(uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64)))
    cut = {f"{name}_N": torch.full((count,), value) for name, value in cuts.items()}
    tokens_N, log_probs_N = sample(logits_NV, torch.full((count,), temperature), uniform_N, **cut)
    return np.bincount(tokens_N.numpy(), minlength=len(logits)) / count, tokens_N, log_probs_N


LOGITS = [0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5]


def test_uniforms_are_uniform_and_independent_of_one_another():
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == values.size
    assert np.abs(np.histogram(values, bins=20, range=(0, 1))[0] / values.size - 0.05).max() < 0.003
    table = values.reshape(seeds.shape)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


def test_tokens_follow_the_temperature_scaled_distribution():
    for temperature in (0.5, 1.0, 2.0):
        shares, tokens_N, log_probs_N = draw(LOGITS, temperature=temperature)
        expected_V = (torch.tensor(LOGITS) / temperature).log_softmax(-1)
        assert np.abs(shares - expected_V.exp().numpy()).max() < 0.012
        assert torch.allclose(log_probs_N, expected_V[tokens_N], atol=1e-6)


def test_top_k_and_top_p_cut_the_tail_and_leave_the_log_probs():
    full_V = torch.tensor(LOGITS).log_softmax(-1)
    kept_by_k = [1, 3, 6]
    shares, tokens_N, log_probs_N = draw(LOGITS, top_k=3)
    expected = np.where(np.isin(np.arange(V), kept_by_k), full_V.exp().numpy(), 0)
    assert np.abs(shares - expected / expected.sum()).max() < 0.012
    assert torch.allclose(log_probs_N, full_V[tokens_N], atol=1e-6)
    shares, _, _ = draw(LOGITS, top_p=0.6)  # 0.42, 0.25 → 0.67 passes 0.6 with the two most likely
    assert set(np.flatnonzero(shares)) == {3, 6}


def test_each_row_has_settings_of_its_own_and_its_neighbours_do_not_change_its_token():
    uniform_N = torch.full((4,), 0.97, dtype=torch.float64)
    settings = {"top_p_N": torch.tensor([1.0, 1.0, 1.0, 0.6]), "top_k_N": torch.tensor([-1, -1, 1, -1])}
    tokens_N, _ = sample(torch.tensor([LOGITS] * 4), torch.tensor([0.0, 1.0, 1.0, 1.0]), uniform_N, **settings)
    alone_N, _ = sample(torch.tensor([LOGITS]), torch.ones(1), uniform_N[:1])
    assert tokens_N.tolist() == [3, alone_N.item(), 3, 6]


def test_a_token_without_probability_is_never_drawn():
    minus = float("-inf")
    logits = [minus, 0.0, minus, 0.0, minus]
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        tokens_N, _ = sample(torch.tensor([logits]), torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
        assert tokens_N.item() in (1, 3)
