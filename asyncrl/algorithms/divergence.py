"""How far the policy is from its reference, per token; the coefficient that goes with it; and the loss of a critic.

d = clamp(lp_ref − lp, ±20), of tokens that the policy sampled. Each estimator also with `+`: its value, and the gradient of k2
straight through, which is that of the divergence itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.algorithms.masking import bounded, masked, response_mean
from asyncrl.config.entries import AdaptiveKl

K3_BOUND = 10.0
"""k3 is cut off here: e^d of a single token could outweigh the batch."""


def k1(difference: torch.Tensor) -> torch.Tensor:
    """−d: unbiased, of high variance, and of expected gradient 0.

    Schulman, joschu.net/blog/kl-approx.html.
    """
    return -difference


def absolute(difference: torch.Tensor) -> torch.Tensor:
    """|d|.

    As `abs` among the estimators of RLHF trainers; a bound on k1 in size.
    """
    return difference.abs()


def k2(difference: torch.Tensor) -> torch.Tensor:
    """d²/2: biased by little, of low variance; its expected gradient is that of the divergence.

    Schulman, joschu.net/blog/kl-approx.html.
    """
    return difference.square() / 2


def k3(difference: torch.Tensor) -> torch.Tensor:
    """min(e^d − 1 − d, 10): unbiased but for the bound, never negative.

    Schulman, joschu.net/blog/kl-approx.html; in GRPO's loss, arXiv 2402.03300 eq. 4.
    """
    return (torch.expm1(difference) - difference).clamp(max=K3_BOUND)


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
"""Name to its function of d; each name also with `+`."""


def estimate_kl(estimator: str, log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Of the dtype of `log_probs`, with gradient to them; none flows to the reference."""
    difference = bounded(reference.detach() - log_probs)
    value = ESTIMATORS[estimator.removesuffix("+")](difference)
    if not estimator.endswith("+"):
        return value
    slope = k2(difference)
    return value.detach() + (slope - slope.detach())


def mean_kl(kl_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """The mean over responses with a trainable token of the mean over their tokens; 0 where there is none."""
    present_B = mask_BT.any(1)
    return masked(response_mean(kl_BT, mask_BT)[:, 0], present_B).sum() / present_B.sum().clamp(min=1)


def adapted_coefficient(coefficient: float, settings: AdaptiveKl, *, kl: float, responses: int) -> float:
    """β(1 + clip(KL/target − 1, ±0.2)·n/horizon), n responses since the last change, KL as `mean_kl` has it.

    Ziegler et al., arXiv 1909.08593 section 2.2.
    """
    error = min(0.2, max(-0.2, kl / settings.target - 1))
    return coefficient * (1 + error * responses / settings.horizon)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float = 0.5
) -> torch.Tensor:
    """½·max((V − R)², (clip(V, V_old ± clip) − R)²) of each token, 0 outside the mask; with gradient to `values`.

    The clipped value loss that goes with PPO; its effect, arXiv 2005.12729 section 3.
    """
    values, old_values, returns = (masked(tensor, mask) for tensor in (values, old_values.detach(), returns.detach()))
    near = torch.clamp(values, old_values - clip, old_values + clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2
