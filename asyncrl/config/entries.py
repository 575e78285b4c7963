"""The named entries of the `algorithm` section: each a name with its own parameters and defaults (ALGORITHMS).

A new estimator, loss or correction is one class here and one function in `asyncrl.algorithms`. Names whose part is not built
yet stand in `asyncrl.config.built`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


class Entry(BaseModel):
    """A named algorithm entry."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Grpo(Entry):
    name: Literal["grpo"] = Field("grpo", description="Reward minus the group's mean, over the group's standard deviation.")
    normalize_std: bool = Field(True, description="Divide by the group's standard deviation; false is Dr.GRPO.")


class Rloo(Entry):
    name: Literal["rloo"] = Field("rloo", description="Reward minus the mean of the group's other members.")


class ReinforcePp(Entry):
    name: Literal["reinforce_pp"] = Field(
        "reinforce_pp", description="Discounted reward to go of each token, whitened over the batch."
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")


class PpoClip(Entry):
    name: Literal["ppo_clip"] = Field(
        "ppo_clip", description="PPO's clipped ratio, with separate lower and upper clip and a dual clip."
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip ε of the ratio.")
    clip_high: float = Field(0.28, gt=0, description="Upper clip ε of the ratio.")
    dual_clip: float | None = Field(
        3.0, gt=1, description="Bound on the loss of a negative advantage, in units of it; null is off."
    )
    aggregation: Aggregation = Field("token_mean", description="How token values become one number, over the global batch.")


class NoCorrection(Entry):
    name: Literal["none"] = Field("none", description="No weight and no mask.")


class TokenTis(Entry):
    name: Literal["token_tis"] = Field("token_tis", description="Each token's ratio to the behaviour policy, cut off at a cap.")
    cap: float = Field(2.0, gt=0, description="Upper bound of each token's weight.")


class StalenessTis(Entry):
    name: Literal["staleness_tis"] = Field(
        "staleness_tis", description="As token_tis, with a cap that tightens with the token's own staleness."
    )
    cap: float = Field(2.0, ge=1, description="Upper bound of the weight of a fresh token.")
    decay: float = Field(
        0.5, ge=0, le=1, description="The bound's excess over 1 shrinks by this factor per version of staleness."
    )


def _entry(default: str) -> BeforeValidator:
    """`rloo` is short for `{name: rloo}`, and a mapping without a name means the default entry."""

    def widen(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict):
            return {"name": default, **value}
        return value

    return BeforeValidator(widen)


Advantage = Annotated[Grpo | Rloo | ReinforcePp, Field(discriminator="name"), _entry("grpo")]
Loss = Annotated[PpoClip, _entry("ppo_clip")]
Correction = Annotated[NoCorrection | TokenTis | StalenessTis, Field(discriminator="name"), _entry("staleness_tis")]
