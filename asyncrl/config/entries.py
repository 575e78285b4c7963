"""The named entries of the `algorithm` section: each a name with its own parameters and defaults (ALGORITHMS).

A new estimator, loss or correction is one class here and one function in `asyncrl.algorithms`.
`KNOWN` also lists the names whose part is not built yet, so that a refusal can say so instead of "unknown".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


class Entry(BaseModel):
    """A named algorithm entry."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Grpo(Entry):
    name: Literal["grpo"] = "grpo"
    normalize_std: bool = Field(True, description="Divide by the group's standard deviation; false is Dr.GRPO.")


class Rloo(Entry):
    name: Literal["rloo"] = "rloo"


class ReinforcePp(Entry):
    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")


class PpoClip(Entry):
    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip ε of the ratio.")
    clip_high: float = Field(0.28, gt=0, description="Upper clip ε of the ratio.")
    dual_clip: float | None = Field(
        3.0, gt=1, description="Bound on the loss of a negative advantage, in units of it; null is off."
    )
    aggregation: Aggregation = Field("token_mean", description="How token values become one number, over the global batch.")


class NoCorrection(Entry):
    name: Literal["none"] = "none"


class TokenTis(Entry):
    name: Literal["token_tis"] = "token_tis"
    cap: float = Field(2.0, gt=0, description="Upper bound of each token's weight.")


class StalenessTis(Entry):
    name: Literal["staleness_tis"] = "staleness_tis"
    cap: float = Field(2.0, ge=1, description="Upper bound of the weight of a fresh token.")
    decay: float = Field(
        0.5, ge=0, le=1, description="The bound's excess over 1 shrinks by this factor per version of staleness."
    )


Advantage = Annotated[Grpo | Rloo | ReinforcePp, Field(discriminator="name")]
Loss = Annotated[PpoClip, Field()]
Correction = Annotated[NoCorrection | TokenTis | StalenessTis, Field(discriminator="name")]

KNOWN: dict[str, tuple[str, ...]] = {
    "algorithm.advantage": (
        "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gpg", "grpo_passk", "gdpo", "gae",
        "optimal_token_baseline", "tir_optimal_token_baseline",
    ),
    "algorithm.loss": (
        "ppo_clip", "cispo", "gspo", "gmpo", "sapo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "dro", "topr", "m2po",
        "reinforce", "gpg",
    ),
    "algorithm.correction": (
        "none", "token_tis", "staleness_tis", "segment_tis", "seq_tis", "token_icepop", "seq_mis", "geo_mis",
        "geo_mis_token_tis", "geo_mis_seq_tis", "k3_mask", "k3_mask_token_tis", "k3_mask_seq_tis", "veto",
    ),
    "algorithm.proximal": ("recompute", "behave", "loglinear"),
}  # fmt: skip
BUILT: dict[str, tuple[str, ...]] = {
    "algorithm.advantage": ("grpo", "rloo", "reinforce_pp"),
    "algorithm.loss": ("ppo_clip",),
    "algorithm.correction": ("none", "token_tis", "staleness_tis"),
    "algorithm.proximal": ("recompute", "behave"),
}


def name_to_mapping(value: Any) -> Any:
    """`grpo` is short for `{name: grpo}`."""
    return {"name": value} if isinstance(value, str) else value
