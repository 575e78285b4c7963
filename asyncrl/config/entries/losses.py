"""Parameters and defaults of every policy loss."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from asyncrl.config.entries.base import AGGREGATED, Aggregation, Entry, Needs, UserFunction

BEHAVIOUR = Needs(anchor="behaviour", weight=False)
NO_RATIO = Needs(anchor="none")
SELECTING = Needs(mini_batch=True, proximals=("recompute", "behave"))
DUAL_CLIP = "Bound on the loss of a negative advantage, in units of it; null is off."


class PolicyLoss(Entry):
    aggregation: Aggregation


class PpoClip(PolicyLoss):
    name: Literal["ppo_clip"] = Field(
        "ppo_clip", description="PPO's clipped ratio, with separate lower and upper clip and a dual clip."
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip ε of the ratio.")
    clip_high: float = Field(0.28, gt=0, description="Upper clip ε of the ratio.")
    dual_clip: float | None = Field(3.0, gt=1, description=DUAL_CLIP)
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class Cispo(PolicyLoss):
    name: Literal["cispo"] = Field("cispo", description="REINFORCE weighted by the capped ratio; every token keeps its gradient.")
    cap: float = Field(5.0, gt=0, description="Upper bound of the ratio.")
    low: float | None = Field(None, ge=0, description="Lower bound of the ratio; null is none.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class Gspo(PolicyLoss):
    name: Literal["gspo"] = Field("gspo", description="A clipped ratio of whole responses: the geometric mean of the tokens'.")
    clip_low: float = Field(3e-4, gt=0, lt=1, description="Lower clip ε of the response's ratio.")
    clip_high: float = Field(4e-4, gt=0, description="Upper clip ε of the response's ratio.")
    aggregation: Aggregation = Field("seq_mean_token_mean", description=AGGREGATED)


class Gmpo(PolicyLoss):
    requires: ClassVar[Needs] = Needs(one_advantage=True)
    name: Literal["gmpo"] = Field(
        "gmpo", description="The geometric mean of a response's clipped ratios times its one advantage."
    )
    clip_low: float = Field(0.4, gt=0, description="Lower clip of a token's log-ratio.")
    clip_high: float = Field(0.4, gt=0, description="Upper clip of a token's log-ratio.")
    aggregation: Literal["seq_mean_token_mean"] = Field(
        "seq_mean_token_mean", description="A response has one value: their mean over responses of the global batch."
    )


class Sapo(PolicyLoss):
    name: Literal["sapo"] = Field("sapo", description="A sigmoid gate on the ratio in the place of a clip.")
    tau: float = Field(1.0, gt=0, description="Steepness of the gate where the advantage is positive.")
    tau_negative: float = Field(1.05, gt=0, description="Steepness of the gate where it is not.")
    aggregation: Aggregation = Field("seq_mean_token_mean", description=AGGREGATED)


class DppoTv(PolicyLoss):
    requires: ClassVar[Needs] = BEHAVIOUR
    name: Literal["dppo_tv"] = Field(
        "dppo_tv", description="REINFORCE with the ratio to the behaviour policy, on tokens whose probability moved little."
    )
    delta: float = Field(0.15, gt=0, le=1, description="Largest change of the token's probability.")
    cap: float = Field(20.0, gt=0, description="Upper bound of the ratio.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class DppoKl(PolicyLoss):
    requires: ClassVar[Needs] = BEHAVIOUR
    name: Literal["dppo_kl"] = Field("dppo_kl", description="dppo_tv with the binary KL divergence of the token as its bound.")
    delta: float = Field(0.05, gt=0, description="Largest binary KL(behaviour‖current) of the token, in nats.")
    cap: float = Field(20.0, gt=0, description="Upper bound of the ratio.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class ClipCov(PolicyLoss):
    requires: ClassVar[Needs] = Needs(mini_batch=True, sample_ids=True, proximals=("recompute", "behave"))
    name: Literal["clip_cov"] = Field(
        "clip_cov", description="ppo_clip, without the gradient of a few tokens of high covariance, drawn at random."
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip ε of the ratio.")
    clip_high: float = Field(0.28, gt=0, description="Upper clip ε of the ratio.")
    dual_clip: float | None = Field(3.0, gt=1, description=DUAL_CLIP)
    low: float = Field(1.0, description="Tokens are drawn among those of a covariance above this.")
    high: float = Field(5.0, description="And below this.")
    ratio: float = Field(2e-4, gt=0, le=1, description="Share of the mini-batch's tokens that are drawn, at least one.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the draw.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class KlCov(PolicyLoss):
    requires: ClassVar[Needs] = SELECTING
    name: Literal["kl_cov"] = Field(
        "kl_cov", description="The plain ratio, with a penalty on the few tokens of largest covariance."
    )
    ratio: float = Field(2e-4, gt=0, le=1, description="Share of the mini-batch's tokens that are penalised, at least one.")
    coef: float = Field(1.0, ge=0, description="Coefficient of the penalty, |log ratio|.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class Dro(PolicyLoss):
    requires: ClassVar[Needs] = BEHAVIOUR
    name: Literal["dro"] = Field("dro", description="REINFORCE with a quadratic pull towards the behaviour policy.")
    beta: float = Field(gt=0, description="Strength of the pull.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class Topr(PolicyLoss):
    requires: ClassVar[Needs] = BEHAVIOUR
    name: Literal["topr"] = Field(
        "topr",
        description="REINFORCE; a negative advantage is weighted by the response's ratio to the behaviour policy, at most 1.",
    )
    cap: float = Field(1.0, gt=0, description="Upper bound of the response's ratio where the advantage is negative.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class M2po(PolicyLoss):
    requires: ClassVar[Needs] = Needs(anchor="behaviour", weight=False, mini_batch=True, proximals=("recompute",))
    name: Literal["m2po"] = Field(
        "m2po", description="The plain ratio to the behaviour policy, without the tokens that make its second moment large."
    )
    tau: float = Field(0.04, gt=0, description="The mean (log w)² of the tokens that stay is below this.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class Reinforce(PolicyLoss):
    requires: ClassVar[Needs] = NO_RATIO
    name: Literal["reinforce"] = Field("reinforce", description="The score-function gradient, without a ratio.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class GpgLoss(PolicyLoss):
    requires: ClassVar[Needs] = NO_RATIO
    name: Literal["gpg"] = Field("gpg", description="The same as reinforce, by the name that goes with the gpg advantage.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)


class UserLoss(PolicyLoss, UserFunction):
    """fn(inputs: LossInputs, **parameters) → values [B, T] or TokenLoss. `aggregation` is asyncrl's and not passed on."""

    aggregation: Aggregation = Field("token_mean", description=AGGREGATED)
