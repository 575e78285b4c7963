"""Parameters and defaults of every advantage estimator."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from asyncrl.config.entries.base import Entry, Needs, UserFunction

GROUP = Needs(group=True)


class Grpo(Entry):
    requires: ClassVar[Needs] = GROUP
    name: Literal["grpo"] = Field("grpo", description="Reward minus the group's mean, over the group's standard deviation.")
    normalize_std: bool = Field(True, description="Divide by the group's standard deviation; false is Dr.GRPO.")


class Rloo(Entry):
    requires: ClassVar[Needs] = GROUP
    name: Literal["rloo"] = Field("rloo", description="Reward minus the mean of the group's other members.")


class ReinforcePp(Entry):
    name: Literal["reinforce_pp"] = Field(
        "reinforce_pp", description="Discounted reward to go of each token, whitened over the batch."
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")

    @property
    def needs(self) -> Needs:
        return Needs(per_token=self.gamma < 1, token_rewards=True)


class ReinforcePpBaseline(Entry):
    requires: ClassVar[Needs] = GROUP
    name: Literal["reinforce_pp_baseline"] = Field(
        "reinforce_pp_baseline", description="Reward minus the group's mean on every token, whitened over the batch."
    )


class Remax(Entry):
    """The run asks for one greedy response more to each prompt, scored like the samples. Whatever becomes of it, it does not
    train; a group whose greedy response failed has failed."""

    requires: ClassVar[Needs] = Needs(greedy=True)
    name: Literal["remax"] = Field("remax", description="Reward minus that of the greedy response to the same prompt.")


class Opo(Entry):
    requires: ClassVar[Needs] = GROUP
    name: Literal["opo"] = Field("opo", description="Reward minus the group's mean weighted by response length.")


class GpgAdvantage(Entry):
    requires: ClassVar[Needs] = GROUP
    name: Literal["gpg"] = Field(
        "gpg", description="Reward minus the group's mean, scaled up by the share of responses in groups whose rewards differ."
    )
    f_norm: float = Field(1.0, gt=0, description="Divisor of every advantage.")


class GrpoPassk(Entry):
    requires: ClassVar[Needs] = GROUP
    name: Literal["grpo_passk"] = Field(
        "grpo_passk", description="The group's best response alone: its lead over the second, over the standard deviation."
    )
    normalize_std: bool = Field(True, description="Divide by the group's standard deviation.")


class Gdpo(Entry):
    requires: ClassVar[Needs] = Needs(group=True, components=True)
    name: Literal["gdpo"] = Field(
        "gdpo", description="grpo for each reward function by itself, their weighted sum normalised over the batch."
    )


class Gae(Entry):
    requires: ClassVar[Needs] = Needs(critic=True, per_token=True, token_rewards=True)
    name: Literal["gae"] = Field("gae", description="Generalised advantage estimation on a critic's values, whitened.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")
    lam: float = Field(1.0, ge=0, le=1, description="λ: 0 trusts the critic alone, 1 the rewards alone.")


class OptimalTokenBaseline(Entry):
    requires: ClassVar[Needs] = Needs(group=True, probabilities=True, per_token=True, mini_batch=True, proximals=("recompute",))
    name: Literal["optimal_token_baseline"] = Field(
        "optimal_token_baseline", description="Reward to go minus the group's mean at that token, weighted by path variance."
    )


class TirOptimalTokenBaseline(Entry):
    requires: ClassVar[Needs] = Needs(
        group=True, probabilities=True, turns=True, per_token=True, mini_batch=True, proximals=("recompute",)
    )
    name: Literal["tir_optimal_token_baseline"] = Field(
        "tir_optimal_token_baseline", description="optimal_token_baseline with turns in the place of tokens."
    )


class Distillation(Entry):
    requires: ClassVar[Needs] = Needs(teacher=True, per_token=True)
    name: Literal["distillation"] = Field(
        "distillation", description="How much likelier each token is to a teacher than to the policy that sampled it."
    )
    coefficient: float = Field(1.0, gt=0, description="Factor of the log-ratio of teacher to behaviour policy.")
    reward_coefficient: float = Field(
        0.0, ge=0, description="Factor of the response's reward, added to every token; 0 leaves it out."
    )


class UserAdvantage(UserFunction):
    """fn(batch: RewardBatch, **parameters) → advantages [B] or [B, T]."""

    requires: ClassVar[Needs] = Needs(per_token=True)
