"""Whether a server computes the log-probs that the trainer does, and if not, what is the likeliest cause.

The same tokens are judged by both. On the trainer's side under what the run says, and under what may have gone wrong: another
temperature, a lower precision. Whichever of these the server's figures fit is named; if none fits, the weights are others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LogProbs = npt.NDArray[np.float32]
TOLERANCE: Mapping[str, tuple[float, float]] = {"float32": (1e-4, 1e-2), "float16": (2e-2, 0.5), "bfloat16": (6e-2, 1.5)}
"""By model.dtype: the largest mean and the largest single |difference| of log-probs that rounding explains. float32 agrees to
1e-5 where both sides use the same operators; half precisions differ by the order of their sums."""
FITS = 0.25  # an explanation must bring the mean difference down to this share of it
ROUNDING = 4.0  # weights rounded to bfloat16 differ by up to this many times what one such rounding moves


@dataclass(frozen=True)
class Gap:
    """|served − trained| over N tokens."""

    mean: float
    largest: float
    tokens: int

    @classmethod
    def of(cls, served_N: LogProbs, trained_N: LogProbs) -> Gap:
        """Where either is not finite the gap is infinite."""
        apart = np.abs(served_N.astype(np.float64) - trained_N)
        apart[~np.isfinite(apart)] = np.inf
        return cls(float(apart.mean()), float(apart.max(initial=0.0)), len(apart))

    def is_within(self, dtype: str) -> bool:
        mean, largest = TOLERANCE[dtype]
        return self.mean <= mean and self.largest <= largest


def likely_cause(
    served_N: LogProbs,
    trained_N: LogProbs,
    *,
    dtype: str,
    temperature: float,
    by_temperature: Mapping[float, LogProbs],
    rounded_N: LogProbs,
) -> str | None:
    """None where the two agree within what `dtype` explains; else what is wrong, in one clause with its fix.

    trained_N: the trainer's log-probs at the run's temperature; by_temperature: at others; rounded_N: at the run's, with weights
    rounded to bfloat16.
    """
    gap = Gap.of(served_N, trained_N)
    if gap.is_within(dtype):
        return None
    others = {value: Gap.of(served_N, log_probs_N) for value, log_probs_N in by_temperature.items() if value != temperature}
    best = min(others, key=lambda value: others[value].mean, default=None)
    if best is not None and (others[best].is_within(dtype) or others[best].mean <= FITS * gap.mean):
        applied = "is not applied by the server" if best == 1.0 else f"is not the server's, which samples at {best:g}"
        return f"temperature: the run's, rollout.temperature {temperature:g}, {applied}"
    rounding = Gap.of(rounded_N, trained_N)
    if gap.mean <= ROUNDING * rounding.mean and dtype == "float32":
        return "dtype: the server computes in a lower precision than model.dtype float32: see its --dtype"
    return (
        "weights: the server's model is not the trainer's (another folder or checkpoint, a tied head where the model's is its "
        "own, or parameters changed on the way)"
    )
