"""The proximal policy: the anchor of the trust region, between the behaviour policy (sampled) and the current one (optimised)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ProximalInputs:
    """behaviour_BT: log-probs at sampling; current_BT: the current policy's, without gradient; recomputed_BT: the policy's at the
    begin of the batch, None where that is the current one; staleness_BT: versions between sampling and the batch."""

    behaviour_BT: torch.Tensor
    current_BT: torch.Tensor
    recomputed_BT: torch.Tensor | None
    staleness_BT: torch.Tensor


@dataclass(frozen=True)
class Proximal:
    """`log_probs` gives lp_prox; `recomputes` says that a batch of more than one update needs a forward pass before the first."""

    log_probs: Callable[[ProximalInputs], torch.Tensor]
    recomputes: bool


def recompute(inputs: ProximalInputs) -> torch.Tensor:
    """The trainer's weights before the batch's first update; with a single update that is the current policy, sg(lp)."""
    return inputs.current_BT if inputs.recomputed_BT is None else inputs.recomputed_BT


def behave(inputs: ProximalInputs) -> torch.Tensor:
    """The behaviour policy itself, so that every weight is 1."""
    return inputs.behaviour_BT


PROXIMALS: dict[str, Proximal] = {
    "recompute": Proximal(recompute, recomputes=True),
    "behave": Proximal(behave, recomputes=False),
}
"""Value of `algorithm.proximal` to its definition."""
