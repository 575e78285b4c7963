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
    recomputes: bool = False


def recompute(inputs: ProximalInputs) -> torch.Tensor:
    """lp_prox of the trainer's weights before the batch's first update; with a single update that is the current policy, sg(lp).

    Decoupled PPO, arXiv 2110.00641 section 3; for language models AReaL, arXiv 2505.24298 section 5.2.
    """
    return inputs.current_BT if inputs.recomputed_BT is None else inputs.recomputed_BT


def behave(inputs: ProximalInputs) -> torch.Tensor:
    """lp_prox = lp_behave, the behaviour policy itself, so that every weight is 1.

    PPO as it was, arXiv 1707.06347.
    """
    return inputs.behaviour_BT


def loglinear(inputs: ProximalInputs) -> torch.Tensor:
    """lp_prox = lp_behave + α(sg(lp) − lp_behave), α = (d − 1)/d for a token's staleness d ≥ 1, 0 at d = 0; no extra forward
    pass.

    A-3PO, arXiv 2512.06547: between the two policies in log space, one version short of the current one.
    """
    alpha_BT = 1 - 1 / inputs.staleness_BT.clamp(min=1).to(inputs.behaviour_BT.dtype)
    return inputs.behaviour_BT + alpha_BT * (inputs.current_BT - inputs.behaviour_BT)


PROXIMALS: dict[str, Proximal] = {
    "recompute": Proximal(recompute, recomputes=True),
    "behave": Proximal(behave),
    "loglinear": Proximal(loglinear),
}
"""Value of `algorithm.proximal` to its definition."""
