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
from asyncrl.algorithms.aggregation import response_coefficients
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
from asyncrl.config.entries import Aggregation, PolicyLoss, UserFunction
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
    teacher_log_probs: torch.Tensor | None = None,
    behaviour_log_probs: torch.Tensor | None = None,
    **params: Any,
) -> torch.Tensor:
    """Advantages [B, T] of a whole batch, of the dtype of `rewards`; 0 outside the mask and where the reward is missing.

    rewards floating [B], NaN = missing; group_ids [B], any integers, equal for the responses to one prompt; reward_components [B,
    K] with component_weights [K] for gdpo; greedy_rewards [B] for remax; log_probs and sum_pi_squared [B, T] under the proximal
    policy for the token baselines; teacher_log_probs and behaviour_log_probs [B, T] for distillation. name: a built-in or
    registered name, `pkg.mod:fn`, or a mapping with `name` and parameters; params: the estimator's own. gae has a call of its
    own, since it needs values.
    """
    entry = naming.resolve("advantage", name, params)
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
        (needs.teacher, teacher_log_probs, "teacher_log_probs"),
        (needs.teacher, behaviour_log_probs, "behaviour_log_probs"),
    ):
        if needed and given is None:
            raise UserError(f"the advantage {entry.name} needs {key}, which is None: give it")
    mask_BT = as_mask(mask)
    rewards_B = _each_response("rewards", floating("rewards", rewards), mask_BT).detach()
    ids_B = _each_response("group_ids", whole("group_ids", group_ids), mask_BT)
    greedy_B = None
    if greedy_rewards is not None:
        greedy_B = _each_response("greedy_rewards", floating("greedy_rewards", greedy_rewards), mask_BT).detach()
    components_BK, weights_K = _components(reward_components, component_weights, mask_BT)
    batch = RewardBatch(
        rewards_B,
        torch.unique(ids_B, return_inverse=True)[1],
        mask_BT,
        components_BK=components_BK,
        component_weights_K=weights_K,
        greedy_B=greedy_B,
        teacher_BT=None if teacher_log_probs is None else _each_token("teacher_log_probs", teacher_log_probs, mask_BT),
        behaviour_BT=None if behaviour_log_probs is None else _each_token("behaviour_log_probs", behaviour_log_probs, mask_BT),
        log_probs_BT=None if log_probs is None else _each_token("log_probs", log_probs, mask_BT),
        sum_pi_squared_BT=None if sum_pi_squared is None else _each_token("sum_pi_squared", sum_pi_squared, mask_BT),
    )
    return estimate(entry, batch)[0]


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [B, T], returns [B, T]), 0 outside the mask, of the dtype of `values`: advantages are whitened over the batch's
    trainable tokens, returns are unwhitened advantages + values.

    rewards, values floating [B, T], per token; masked tokens are skipped; the value after the last token is 0, also where a
    response was truncated. gamma, lam in [0, 1]."""
    mask_BT = as_mask(mask)
    entry = naming.resolve("advantage", "gae", {"gamma": gamma, "lam": lam})
    values_BT = _each_token("values", values, mask_BT)
    rewards_BT = _each_token("rewards", rewards, mask_BT)
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
    For seq_mean_token_sum_norm it is the constant, T where it is None. token_sum takes none. A loss that singles tokens out of
    the mini-batch (clip_cov, kl_cov, m2po) must be given the whole one.
    """
    entry = naming.resolve("loss", name, params if aggregation is None else {**params, "aggregation": aggregation})
    needs = loss_needs(entry)
    mask_BT = as_mask(mask)
    log_probs_BT = same_shape("log_probs", floating("log_probs", log_probs), mask_BT)
    proximal_BT = behaviour_BT = _each_token("old_log_probs", old_log_probs, mask_BT)
    if behaviour_log_probs is not None:
        behaviour_BT = _each_token("behaviour_log_probs", behaviour_log_probs, mask_BT)
    advantages_BT = _advantages(advantages, mask_BT, entry.name if needs.one_advantage else None)
    weights_BT = torch.ones_like(advantages_BT)
    if weights is not None:
        weights_BT = _weights(weights, mask_BT, None if needs.weight else entry.name)
    ids_B = None
    if sample_ids is not None:
        ids_B = _sample_ids(sample_ids, mask_BT)
    elif needs.sample_ids:
        raise UserError(f"the loss {entry.name} needs sample_ids, which is None: give each response an integer of its own")
    kind = log_probs_BT.dtype
    proximal_BT, behaviour_BT, advantages_BT = proximal_BT.to(kind), behaviour_BT.to(kind), advantages_BT.to(kind)
    selected_BT = select(entry, MiniBatch(proximal_BT, behaviour_BT, advantages_BT, mask_BT, ids_B))
    losses = token_loss(
        entry, LossInputs(log_probs_BT, proximal_BT, behaviour_BT, advantages_BT, weights_BT.to(kind), mask_BT, selected_BT)
    )
    assert isinstance(entry, PolicyLoss)
    coefficients_B = _coefficients(entry.aggregation, mask_BT, normalizer)
    loss = (losses.values_BT * coefficients_B[:, None].to(kind)).sum()
    tokens = max(1, int(mask_BT.sum()))
    moved_BT = clamped_log_ratio(log_probs_BT.detach(), proximal_BT, mask_BT).double()
    metrics = {
        "loss/policy": float(loss.detach()),
        "tokens": float(mask_BT.sum()),
        "policy/kl_proximal": float((torch.expm1(moved_BT) - moved_BT).sum()) / tokens,
        **{f"loss/{name}": int(flag_BT.sum()) / tokens for name, flag_BT in losses.flags.items()},
    }
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
    proximal_BT = _each_token("proximal_log_probs", proximal_log_probs, mask_BT)
    behaviour_BT = _each_token("behaviour_log_probs", behaviour_log_probs, mask_BT)
    needs = needs_of("correction", entry) if isinstance(entry, UserFunction) else entry.needs
    if token_staleness is None and needs.staleness and not isinstance(entry, UserFunction):
        raise UserError(
            f"the correction {entry.name} needs token_staleness, which is None: give each token's, zeros where all are fresh"
        )
    staleness_BT = _staleness(token_staleness, mask_BT)
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


def _each_token(name: str, values: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return same_shape(name, floating(name, values).detach(), mask_BT)


def _each_response(name: str, values: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return shaped(name, values, (mask_BT.shape[0],), "one for each response, a row of mask")


def _components(
    components: torch.Tensor | None, weights: torch.Tensor | None, mask_BT: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Reward components [B, K] and their weights [K], as far as they are given."""
    if components is None:
        return None, None
    components_BK = floating("reward_components", components).detach()
    if components_BK.dim() != 2 or components_BK.shape[0] != mask_BT.shape[0]:
        raise UserError(
            f"reward_components has shape {tuple(components_BK.shape)}, but must be [B, K] with B = {mask_BT.shape[0]}: one "
            "score of each reward function for each response"
        )
    if weights is None:
        return components_BK, None
    weights_K = torch.as_tensor(weights, dtype=torch.float64)
    shaped("component_weights", weights_K, (components_BK.shape[1],), "one for each reward component")
    if not bool(weights_K.isfinite().all()):
        raise UserError(f"component_weights is {weights_K.tolist()}, but must be finite: give each component a finite weight")
    return components_BK, weights_K


def _advantages(values: torch.Tensor, mask_BT: torch.Tensor, one_each_for: str | None) -> torch.Tensor:
    """[B, T], from [B, T] or [B]. one_each_for: a loss that refuses advantages that differ within a response."""
    values = floating("advantages", values).detach()
    if values.dim() == 1:
        return _each_response("advantages", values, mask_BT)[:, None].expand(mask_BT.shape)
    advantages_BT = same_shape("advantages", values, mask_BT)
    if one_each_for is None or not mask_BT.numel():
        return advantages_BT
    highest_B = masked(advantages_BT, mask_BT, -torch.inf).amax(1)
    lowest_B = masked(advantages_BT, mask_BT, torch.inf).amin(1)
    apart_B = torch.nonzero(highest_B > lowest_B)[:, 0].tolist()
    if apart_B:
        row = apart_B[0]
        raise UserError(
            f"{one_each_for} takes one advantage per response, but those of response {row} range from {float(lowest_B[row]):g} "
            f"to {float(highest_B[row]):g}: use an outcome advantage such as grpo, or another loss"
        )
    return advantages_BT


def _weights(values: torch.Tensor, mask_BT: torch.Tensor, refused_by: str | None) -> torch.Tensor:
    if refused_by is not None:
        raise UserError(
            f"{refused_by} takes its ratio against the behaviour policy and no weights, but weights were given: leave them out, "
            "and give behaviour_log_probs"
        )
    weights_BT = _each_token("weights", values, mask_BT)
    if bool((masked(weights_BT, mask_BT) < 0).any()):
        raise UserError("weights holds a negative one, but ratios of probabilities are not negative: give w, not its logarithm")
    return weights_BT


def _sample_ids(values: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    ids_B = _each_response("sample_ids", whole("sample_ids", values), mask_BT)
    if len(torch.unique(ids_B)) < len(ids_B):
        raise UserError("sample_ids holds an id twice, but the draw must not depend on the order: give each response its own")
    return ids_B


def _staleness(values: torch.Tensor | None, mask_BT: torch.Tensor) -> torch.Tensor:
    """int64[B, T], 0 outside the mask and where none is given."""
    if values is None:
        return torch.zeros(mask_BT.shape, dtype=torch.int64, device=mask_BT.device)
    staleness_BT = same_shape("token_staleness", whole("token_staleness", values, mask_BT), mask_BT)
    if bool((staleness_BT < 0).any()):
        raise UserError("token_staleness holds a negative one, but no token is newer than the trainer: give versions ≥ 0")
    return staleness_BT


def _coefficients(aggregation: Aggregation, mask_BT: torch.Tensor, normalizer: float | None) -> torch.Tensor:
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
