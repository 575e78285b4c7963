"""Names and parameters of KL estimators, their coefficient, the value loss and the length penalty."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from asyncrl.config.entries.base import Entry

KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
"""With `+`: its value, and the gradient of k2 straight through."""


class AdaptiveKl(BaseModel):
    """A coefficient that moves so that the divergence stays near a target (arXiv 1909.08593 section 2.2)."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    target: float = Field(gt=0, description="Divergence from the reference to be held, in nats per token.")
    horizon: float = Field(10000.0, gt=0, description="Responses over which the coefficient can move by a fifth.")


class Kl(Entry):
    """The divergence of the policy from a reference model, and where it counts."""

    name: KlEstimator = Field("k3", description="How the divergence is estimated from each sampled token's log-probs.")
    coefficient: float = Field(0.001, ge=0, description="β: what a nat costs, in units of the loss or of the reward.")
    where: Literal["loss", "reward"] = Field(
        "loss",
        description="In the loss, with a gradient; or in the reward, subtracted token by token before the group's statistics.",
    )
    adaptive: AdaptiveKl | None = Field(
        None, description="Move the coefficient, which is its first value then, to hold a divergence; null leaves it as it is."
    )
