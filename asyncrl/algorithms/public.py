"""The calls for notebooks and other trainers, in front of the very functions that asyncrl's own trainer runs.

Tensors are padded [B, T], a row a whole response. Half precisions are computed in float32; float32 and float64 stay. `mask` is
bool or 0/1 of any dtype, True at trainable tokens; what stands elsewhere (NaN, inf) changes nothing. Mistakes raise
`asyncrl.errors.UserError` with the rule, the value found and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.algorithms import naming
from asyncrl.algorithms.advantages import RewardBatch, estimate, gae_and_returns
from asyncrl.algorithms.aggregation import AGGREGATIONS, response_coefficients
from asyncrl.algorithms.checking import (
    as_mask,
    floating,
    same_shape,
    shaped,
    whole,
)
from asyncrl.algorithms.corrections import CorrectionInputs, correct
from asyncrl.algorithms.custom import needs_of
from asyncrl.algorithms.divergence import ESTIMATORS, estimate_kl
from asyncrl.algorithms.losses import LossInputs, MiniBatch, loss_needs, select, token_loss
from asyncrl.algorithms.masking import clamped_log_ratio, masked
from asyncrl.algorithms.reports import correction_metrics, correction_sums
from asyncrl.config.entries import UserFunction
from asyncrl.config.walk import nearest
from asyncrl.errors import UserError

Named = str | Mapping[str, Any]
MOST_LEVELS = 64
"""Staleness levels that `correction` reports apart; older tokens share the last one."""


def advantage(
    name: Named,
    *,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    group_ids: torch.Tensor,
    reward_components: torch.Tensor | None = None,
    component_weights: torch.Tensor | None = None,
    greedy_rewards: torch.Tensor | None = None,
    log_probs: torch.Tensor | None = None,
    sum_pi_squared: torch.Tensor | None = None,
    **params: Any,
) -> torch.Tensor:
    """Advantages [B, T] of a whole batch, of the dtype of `rewards`; 0 outside the mask and where the reward is missing.

    rewards floating [B], NaN = missing; group_ids [B], any integers, equal for the responses to one prompt; reward_components
    [B, K] with component_weights [K] for gdpo; greedy_rewards [B] for remax; log_probs and sum_pi_squared [B, T] under the
    proximal
    policy for the token baselines. name: a built-in or registered name, `pkg.mod:fn`, or a mapping with `name` and parameters;
    params: the estimator's own. gae has a call of its own, since it needs values.
    """
    entry = naming.resolve("advantage", name, params)
    rewards = floating("rewards", rewards)
    mask_BT = as_mask(mask)
    batch = mask_BT.shape[0]
    shaped("rewards", rewards, (batch,), "one for each row of mask")
    needs = needs_of("advantage", entry) if isinstance(entry, UserFunction) else entry.needs
    if needs.critic:
        raise UserError(
            f"{entry.name} needs the values of a critic: call asyncrl.algorithms.gae(rewards, values, mask, gamma=…, lam=…)"
        )
    for needed, given, key in (
        (needs.components, reward_components, "reward_components"),
        (needs.components, component_weights, "component_weights"),
        (needs.greedy, greedy_rewards, "greedy_rewards"),
        (needs.probabilities, log_probs, "log_probs"),
        (needs.probabilities, sum_pi_squared, "sum_pi_squared"),
    ):
        if needed and given is None:
            raise UserError(f"the advantage {entry.name} needs {key}, which is None: give it")
    components = weights = greedy = log_probs_BT = squared_BT = None
    if reward_components is not None:
        components = floating("reward_components", reward_components)
        if components.dim() != 2 or components.shape[0] != batch:
            raise UserError(
                f"reward_components has shape {tuple(components.shape)}, but must be [B, K] with B = {batch}: one score of each "
                "reward function for each response"
            )
    if component_weights is not None:
        weights = floating("component_weights", torch.as_tensor(component_weights, dtype=torch.float64))
        shaped("component_weights", weights, (0 if components is None else components.shape[1],), "one for each reward component")
        if not bool(weights.isfinite().all()):
            raise UserError(f"component_weights is {weights.tolist()}, but must be finite: give each component a finite weight")
    if greedy_rewards is not None:
        greedy = shaped("greedy_rewards", floating("greedy_rewards", greedy_rewards), (batch,), "one for each response")
    if log_probs is not None:
        log_probs_BT = same_shape("log_probs", floating("log_probs", log_probs).detach(), mask_BT)
    if sum_pi_squared is not None:
        squared_BT = same_shape("sum_pi_squared", floating("sum_pi_squared", sum_pi_squared).detach(), mask_BT)
    ids = shaped("group_ids", whole("group_ids", group_ids), (batch,), "one for each response")
    groups = torch.unique(ids, return_inverse=True)[1] if batch else ids
    given_batch = RewardBatch(
        rewards.detach(), groups, mask_BT, components_BK=components, component_weights_K=weights, greedy_B=greedy,
        log_probs_BT=log_probs_BT, sum_pi_squared_BT=squared_BT,
    )  # fmt: skip
    return estimate(entry, given_batch)[0]


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [B, T] whitened over the batch's trainable tokens, returns [B, T] = unwhitened advantages + values), 0
    outside the
    mask, of the dtype of `values`. rewards, values floating [B, T], per token; masked tokens are skipped; the value after the
    last token is 0, also where a response was truncated. gamma, lam in [0, 1]."""
    mask_BT = as_mask(mask)
    entry = naming.resolve("advantage", "gae", {"gamma": gamma, "lam": lam})
    values_BT = same_shape("values", floating("values", values).detach(), mask_BT)
    rewards_BT = same_shape("rewards", floating("rewards", rewards).detach(), mask_BT).to(values_BT.dtype)
    parameters = entry.model_dump()
    return gae_and_returns(rewards_BT, values_BT, mask_BT, gamma=parameters["gamma"], lam=parameters["lam"])


def policy_loss(
    name: Named,
    *,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    behaviour_log_probs: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    sample_ids: torch.Tensor | None = None,
    aggregation: str | None = None,
    normalizer: float | None = None,
    **params: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(loss, a scalar with gradient to `log_probs` alone; metrics, flat names to floats).

    All floating [B, T]: log_probs of the current policy; old_log_probs of the proximal one; behaviour_log_probs of the one that
    sampled, None where that is the proximal one; advantages (also [B]); weights ≥ 0, w as `correction` returns it, None for 1.
    sample_ids integer [B], all different, for clip_cov. aggregation: None is the loss's own default.

    normalizer: None counts this batch. For a part of a larger batch give the whole one's count, and the parts' losses and
    gradients add up: of trainable tokens for token_mean, of responses with one for seq_mean_token_mean and seq_mean_token_sum.
    For
    seq_mean_token_sum_norm it is the constant, T where it is None. token_sum takes none. A loss that singles tokens out of the
    mini-batch (clip_cov, kl_cov, m2po) must be given the whole one.
    """
    entry = naming.resolve("loss", name, params if aggregation is None else {**params, "aggregation": aggregation})
    needs = loss_needs(entry)
    mask_BT = as_mask(mask)
    log_probs_BT = same_shape("log_probs", floating("log_probs", log_probs), mask_BT)
    proximal_BT = same_shape("old_log_probs", floating("old_log_probs", old_log_probs).detach(), mask_BT).to(log_probs_BT.dtype)
    behaviour_BT = proximal_BT
    if behaviour_log_probs is not None:
        behaviour_BT = same_shape("behaviour_log_probs", floating("behaviour_log_probs", behaviour_log_probs).detach(), mask_BT)
    advantages = floating("advantages", advantages).detach()
    if advantages.dim() == 1:
        advantages = shaped("advantages", advantages, (mask_BT.shape[0],), "one for each response")[:, None].expand(mask_BT.shape)
    advantages_BT = same_shape("advantages", advantages, mask_BT).to(log_probs_BT.dtype)
    if needs.one_advantage:
        _one_each(entry.name, advantages_BT, mask_BT)
    if weights is not None and not needs.weight:
        raise UserError(
            f"{entry.name} takes its ratio against the behaviour policy and no weights, but weights were given: leave them "
            "out, and give behaviour_log_probs"
        )
    weights_BT = torch.ones_like(advantages_BT)
    if weights is not None:
        weights_BT = same_shape("weights", floating("weights", weights).detach(), mask_BT).to(log_probs_BT.dtype)
        if bool((masked(weights_BT, mask_BT) < 0).any()):
            raise UserError(
                "weights holds a negative one, but ratios of probabilities are never negative: give w, not its logarithm"
            )
    ids = None
    if sample_ids is not None:
        ids = shaped("sample_ids", whole("sample_ids", sample_ids), (mask_BT.shape[0],), "one for each response")
        if len(torch.unique(ids)) < len(ids):
            raise UserError("sample_ids holds an id twice, but the draw must not depend on the order: give each response its own")
    elif needs.sample_ids:
        raise UserError(
            f"the loss {entry.name} needs sample_ids, which is None: give each response of the run an integer of its own"
        )
    chosen_BT = select(entry, MiniBatch(proximal_BT, behaviour_BT, advantages_BT, mask_BT, ids))
    inputs = LossInputs(
        log_probs_BT, proximal_BT, behaviour_BT.to(log_probs_BT.dtype), advantages_BT, weights_BT, mask_BT, chosen_BT
    )
    losses = token_loss(entry, inputs)
    coefficients_B = _coefficients(getattr(entry, "aggregation"), mask_BT, normalizer)  # noqa: B009 (every loss's entry has one)
    loss = (losses.values_BT * coefficients_B[:, None].to(losses.values_BT.dtype)).sum()
    tokens = int(mask_BT.sum())
    moved_BT = clamped_log_ratio(log_probs_BT.detach(), proximal_BT, mask_BT).double()
    metrics = {"loss/policy": float(loss.detach()), "tokens": float(tokens)}
    metrics["policy/kl_proximal"] = float((torch.expm1(moved_BT) - moved_BT).sum()) / max(1, tokens)
    metrics |= {f"loss/{flag}": int(where_BT.sum()) / max(1, tokens) for flag, where_BT in losses.flags.items()}
    return loss, metrics


def correction(
    preset_or_config: Named,
    *,
    proximal_log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    mask: torch.Tensor,
    token_staleness: torch.Tensor | None = None,
    **params: Any,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """(weights [B, T] ≥ 0 without gradient, mask bool [B, T], metrics in all and by staleness).

    proximal_log_probs, behaviour_log_probs floating [B, T] (for a loss without a ratio the current policy's in the place of the
    proximal one's); token_staleness integer [B, T] ≥ 0, versions between a token's and the trainer's, None where all are 0. The
    mask is narrower only where the correction drops; weights are 0 outside it (1 for `none`).
    """
    entry = naming.resolve("correction", preset_or_config, params)
    mask_BT = as_mask(mask)
    proximal_BT = same_shape("proximal_log_probs", floating("proximal_log_probs", proximal_log_probs).detach(), mask_BT)
    behaviour_BT = same_shape("behaviour_log_probs", floating("behaviour_log_probs", behaviour_log_probs).detach(), mask_BT)
    needs = needs_of("correction", entry) if isinstance(entry, UserFunction) else entry.needs
    if token_staleness is None:
        if needs.staleness and not isinstance(entry, UserFunction):
            raise UserError(
                f"the correction {entry.name} needs token_staleness, which is None: give each token's, zeros where all are fresh"
            )
        staleness_BT = torch.zeros(mask_BT.shape, dtype=torch.int64, device=mask_BT.device)
    else:
        staleness_BT = same_shape("token_staleness", whole("token_staleness", token_staleness, mask_BT), mask_BT)
        if bool((staleness_BT < 0).any()):
            raise UserError("token_staleness holds a negative one, but a token is no newer than the trainer: give versions ≥ 0")
    inputs = CorrectionInputs.of(proximal_BT, behaviour_BT, staleness_BT, mask_BT)
    corrected = correct(entry, inputs)
    sums, largest = correction_sums(
        ratio_BT=inputs.ratio_BT, behaviour_BT=behaviour_BT, proximal_BT=proximal_BT, staleness_BT=staleness_BT, mask_BT=mask_BT,
        flags=corrected.flags, levels=min(MOST_LEVELS, int(staleness_BT.max()) + 1 if staleness_BT.numel() else 1),
    )  # fmt: skip
    return corrected.weights_BT, corrected.mask_BT, correction_metrics(sums, largest)


def kl(estimator: str, log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """KL(policy‖reference) per token, [B, T] (any shape), with gradient to `log_probs` alone. estimator: k1, abs, k2, k3, or
    one of them with `+`: its value with k2's gradient straight through."""
    known = tuple(name + plus for plus in ("", "+") for name in ESTIMATORS)
    if not isinstance(estimator, str) or estimator not in known:
        likest = nearest(str(estimator), known)
        raise UserError(f"{estimator!r} is no KL estimator: the nearest is {likest!r} (there are {', '.join(known)})")
    log_probs, reference = floating("log_probs", log_probs), floating("reference_log_probs", reference_log_probs)
    if log_probs.shape != reference.shape:
        raise UserError(
            f"reference_log_probs has shape {tuple(reference.shape)}, but log_probs has {tuple(log_probs.shape)}: give both for "
            "the same tokens"
        )
    return estimate_kl(estimator, log_probs, reference)


def _coefficients(aggregation: Any, mask_BT: torch.Tensor, normalizer: float | None) -> torch.Tensor:
    assert aggregation in AGGREGATIONS
    if normalizer is not None and (isinstance(normalizer, bool) or not 0 < float(normalizer) < float("inf")):
        raise UserError(
            f"normalizer is {normalizer!r}, but must be a finite number above 0: give the whole batch's count, or None"
        )
    if normalizer is not None and aggregation == "token_sum":
        raise UserError(
            f"normalizer is {normalizer!r}, but token_sum divides by nothing: leave it out, or use another aggregation"
        )
    constant = aggregation == "seq_mean_token_sum_norm"
    return response_coefficients(
        aggregation,
        mask_BT.sum(1),
        max_response_tokens=float(normalizer) if constant and normalizer is not None else max(1, mask_BT.shape[1]),
        denominator=None if constant or normalizer is None else float(normalizer),
    )


def _one_each(name: str, advantages_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
    """Refuse advantages that differ within a response."""
    highest_B = masked(advantages_BT, mask_BT, -torch.inf).amax(1) if mask_BT.numel() else advantages_BT.sum(1)
    lowest_B = masked(advantages_BT, mask_BT, torch.inf).amin(1) if mask_BT.numel() else highest_B
    apart_B = torch.nonzero((highest_B > lowest_B) & mask_BT.any(1))[:, 0].tolist()
    if apart_B:
        row = apart_B[0]
        raise UserError(
            f"{name} takes one advantage per response, but those of response {row} range from {float(lowest_B[row]):g} to "
            f"{float(highest_B[row]):g}: use an outcome advantage such as grpo, or another loss"
        )
