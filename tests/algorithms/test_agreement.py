"""Server and trainer compared: agreement within the precision, and each cause of a difference by its name."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.algorithms.agreement import Gap, likely_cause

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(0, 2, (200, 50))
TOKENS = RANDOM.integers(0, 50, 200)


def log_probs(temperature: float, logits: np.ndarray = LOGITS) -> np.ndarray:
    scaled = logits / temperature
    whole = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
    return whole[np.arange(len(TOKENS)), TOKENS].astype(np.float32)


def rounded(logits: np.ndarray = LOGITS, relative: float = 2e-3) -> np.ndarray:
    return logits * (1 + relative * np.random.default_rng(1).normal(size=logits.shape))


def cause(served: np.ndarray, *, dtype: str = "float32", temperature: float = 1.0) -> str | None:
    return likely_cause(
        served,
        log_probs(temperature),
        dtype=dtype,
        temperature=temperature,
        by_temperature={value: log_probs(value) for value in (0.5, 0.7, 1.0, 1.2)},
        rounded_N=log_probs(temperature, rounded()),
    )


def test_rounding_of_float32_is_agreement():
    assert cause(log_probs(1.0) + np.float32(3e-5)) is None


def test_what_bfloat16_does_is_agreement_in_bfloat16_and_not_in_float32():
    served = log_probs(1.0, rounded(relative=3e-3))
    assert cause(served, dtype="bfloat16") is None
    assert str(cause(served)).startswith("dtype:")


@pytest.mark.parametrize(("run", "server", "words"), [(0.7, 1.0, "not applied by the server"), (1.0, 0.7, "samples at 0.7")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_temperature_on_one_side_is_named(run, server, words, dtype):
    found = str(cause(log_probs(server, rounded(relative=1e-3) if dtype == "bfloat16" else LOGITS), dtype=dtype, temperature=run))
    assert found.startswith("temperature:")
    assert words in found


def test_weights_moved_by_a_hundredth_are_named():
    moved = LOGITS + 0.02 * np.abs(LOGITS).mean() * np.random.default_rng(2).normal(size=LOGITS.shape)
    assert str(cause(log_probs(1.0, moved))).startswith("weights:")


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_never_agrees(bad):
    served = log_probs(1.0)
    served[7] = bad
    assert Gap.of(served, log_probs(1.0)).largest == np.inf
    assert cause(served, dtype="bfloat16") is not None
