"""Names and parameters of KL estimators, their coefficient, the value loss and the length penalty."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
"""With `+`: its value, and the gradient of k2 straight through."""


class AdaptiveKl(BaseModel):
    """A coefficient that moves so that the divergence stays near a target (arXiv 1909.08593 section 2.2)."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    target: float = Field(gt=0, description="Divergence from the reference to be held, in nats per token.")
    horizon: float = Field(10000.0, gt=0, description="Responses over which the coefficient can move by a fifth.")
