"""Random ragged batches, and what a masked position may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

TOLERANCE = {torch.float64: {"rtol": 1e-10, "atol": 1e-10}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}
DTYPES = [torch.float64, torch.float32]


@dataclass(frozen=True)
class Batch:
    """B responses of T tokens at most, in numpy: rewards with missing ones, groups of one to four, masks with holes, empty and
    one-token responses."""

    rewards: Any
    components: Any
    greedy: Any
    groups: Any
    mask: Any
    staleness: Any
    log_probs: Any
    proximal: Any
    behaviour: Any
    sum_pi_squared: Any
    values: Any
    advantages: Any
    ids: Any

    def rows(self, order: Any) -> Batch:
        return Batch(**{name: values[order] for name, values in vars(self).items()})

    def poisoned(self, value: float) -> Batch:
        """The same, with `value` at every masked position."""
        names = ("log_probs", "proximal", "behaviour", "sum_pi_squared", "values", "advantages")
        return replace(self, **{name: np.where(self.mask, getattr(self, name), value) for name in names})

    def at(self, dtype: torch.dtype) -> Batch:
        """The numbers as that precision has them, in float64."""
        if dtype == torch.float64:
            return self
        rounded = {
            name: values.astype(np.float32).astype(np.float64)
            for name, values in vars(self).items()
            if values.dtype == np.float64
        }
        return replace(self, **rounded)


def random_batch(seed: int, *, groups: int = 5, width: int = 9, spread: float = 0.6) -> Batch:
    """spread: standard deviation of the log-ratios."""
    random = np.random.default_rng(seed)
    members = np.concatenate([[1], random.integers(2, 5, groups - 1)])
    group = np.repeat(random.choice(1000, groups, replace=False) - 500, members)
    B = len(group)
    lengths = random.integers(2, width + 1, B)
    lengths[:3] = [width, 1, 0]
    lengths = random.permutation(lengths)
    mask = (np.arange(width) < lengths[:, None]) & ((random.random((B, width)) < 0.8) | (lengths[:, None] == 1))
    shape = (B, width)
    rewards, components = random.normal(size=B), random.normal(size=(B, 2))
    rewards[group == group[-1]] = 0.3
    rewards[random.integers(0, B - members[-1])] = np.nan
    components[random.integers(0, B), 0] = np.nan
    log_probs = -random.exponential(1.0, shape) - 0.05
    cap = lambda values: np.minimum(values, -1e-3)  # noqa: E731 (log-probs are below 0)
    proximal = cap(log_probs + random.normal(scale=spread, size=shape))
    probability = np.exp(log_probs)
    return Batch(
        rewards=rewards,
        components=components,
        greedy=random.normal(size=B),
        groups=group,
        mask=mask,
        staleness=random.integers(0, 4, shape),
        log_probs=log_probs,
        proximal=proximal,
        behaviour=cap(proximal + random.normal(scale=spread, size=shape)),
        sum_pi_squared=probability**2 + (1 - probability) ** 2 * random.random(shape),
        values=random.normal(size=shape),
        advantages=random.normal(size=shape),
        ids=random.permutation(10_000)[:B] * 7919,
    )


def tensor(values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype if np.asarray(values).dtype == np.float64 else None)
