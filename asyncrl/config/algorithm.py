"""The schema of pipeline.yaml's section `algorithm`, and of the models that an algorithm may ask for beside the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.config.entries import Advantage, Correction, Grpo, KlTerm, Loss, PpoClip, StalenessTis
from asyncrl.config.section import HTTP_PATTERN, Section, Whole


class CriticConfig(Section):
    learning_rate: float = Field(
        1.0e-5, gt=0, description="AdamW's peak learning rate of the critic; training.schedule is its too."
    )
    warmup_steps: Whole = Field(0, ge=0, description="First steps in which the critic learns and the policy does not.")
    value_clip: float = Field(0.5, gt=0, description="A value moves at most this far from that before the step, for its loss.")
    path: str | None = Field(
        None, min_length=1, description="Model folder or hub name that the critic starts from; null: the policy's own weights."
    )


class TeacherConfig(Section):
    path: str | None = Field(
        None, min_length=1, description="Model folder or hub name that a server of the run's own serves, frozen: row teacher/0."
    )
    url: str | None = Field(
        None, pattern=HTTP_PATTERN, description="HTTP address of a running SGLang server that serves the teacher."
    )
    timeout_seconds: float = Field(
        60.0, gt=0, description="A response that the teacher has not judged by then is a failed sample; retries are within it."
    )


class ReferenceConfig(Section):
    path: str | None = Field(
        None, min_length=1, description="Model folder or hub name of the reference; null: the policy's own weights at the start."
    )
    refresh_every: Whole = Field(
        0, ge=0, description="The policy's weights of each version that this divides become the reference; 0 never changes it."
    )


class AlgorithmConfig(Section):
    advantage: Advantage = Field(default_factory=Grpo, description="Advantage estimator.")
    loss: Loss = Field(default_factory=PpoClip, description="Policy loss.")
    correction: Correction = Field(default_factory=StalenessTis, description="Importance correction of stale tokens.")
    proximal: Literal["recompute", "behave", "loglinear"] = Field(
        "recompute",
        description="Anchor of the trust region: recomputed under the trainer's weights, the behaviour policy, or a point between it and the current one by each token's staleness (loglinear).",
    )
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic of algorithm.advantage gae.")
    teacher: TeacherConfig = Field(
        default_factory=TeacherConfig, description="The teacher of algorithm.advantage distillation: a path or a url."
    )
    kl: KlTerm = Field(
        None, description="Divergence of the policy from a reference model, in the loss or the reward; null is off."
    )
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="The reference model of algorithm.kl.")
    entropy_coefficient: float = Field(
        0.0,
        ge=0,
        description="c: the loss gets −c times the policy's entropy of each token, in nats, with its gradient; 0 is off.",
    )

    @property
    def serves_teacher(self) -> bool:
        """Whether the run has a server of its own for the teacher."""
        return self.advantage.needs.teacher and self.teacher.path is not None
