"""What the trainer service knows of the machine that computes gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.messages import ScoredGroup


@dataclass(frozen=True)
class TrainBatch:
    """One step's work, the same on every rank.

    groups: what trains, loss masks already narrowed by the staleness bound; mini_batches: indices into `groups`, one list per
    optimizer update of one pass; version: the trainer's when the step began (staleness of a token = max(0, version − its own)).
    """

    step: int
    version: int
    learning_rate: float
    groups: tuple[ScoredGroup, ...]
    mini_batches: tuple[tuple[int, ...], ...]
    epochs: int = 1


@dataclass(frozen=True)
class StepOutcome:
    """updates: optimizer updates made; bad_updates: those skipped for a non-finite loss or gradient; metrics: flat names, already
    reduced over ranks (the same on each)."""

    updates: int
    bad_updates: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class TrainingEngine(Protocol):
    """Blocking calls, made in the same order on every rank (the service runs them off its event loop)."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank. Raises DeadlineExceeded when a peer does not come by training.step_timeout_seconds."""

    def train(self, batch: TrainBatch) -> StepOutcome:
        """Advantages, proximal log-probs, corrections, and one optimizer update per mini-batch and pass."""

    def close(self) -> None:
        """Leave the process group."""


class EngineLauncher(Protocol):
    """Brings one rank's engine up in two blocking moves, because ranks learn of each other only when all of them are there."""

    def prepare(self) -> str:
        """What needs no peers (loading the model). Rank 0 of several opens a meeting point and returns its address, others ""."""

    def join(self, meeting_point: str) -> TrainingEngine:
        """Meet the other ranks at rank 0's address."""
