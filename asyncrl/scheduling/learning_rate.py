"""The learning rate of every step: a warm-up, then constant, linear or cosine, over a known number of steps."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, total_steps: int, warmup_steps: int, schedule: Schedule, final_factor: float
) -> float:
    """Of the `step`-th step, counted from 1.

    Warm-up: peak·step/warmup_steps, so that the first step already moves and step `warmup_steps` has the peak. Then, with
    x = (step − 1 − warmup_steps)/(total_steps − warmup_steps), 0 on the first step after the warm-up and 1 just past the last
    one: linear peak·(1 − (1 − f)x), cosine peak·(f + (1 − f)(1 + cos πx)/2), f = `final_factor`.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    done = min(1.0, (step - 1 - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (final_factor + (1 - final_factor) * remaining)
