"""What the trainer service knows of the machine that computes gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from asyncrl.messages import ScoredGroup

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


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

    def judge(self, batch: TrainBatch, temperature: float, rounded: bool) -> npt.NDArray[np.float32]:
        """Log-probs float32[N] of the batch's trainable tokens at this temperature, in the order of groups, members and places,
        the same on every rank; `rounded`: with weights rounded to bfloat16 for the moment."""

    def begin_save(self, folder: str) -> float:
        """Copy model, optimizer and the state of every random generator aside, and begin to write them into `folder` in the
        background. Returns the seconds that the optimizer was held. At most one save at a time; one that cannot be begun is a
        failed save, and `finish_save` says why."""

    def save_done(self) -> bool:
        """Whether this rank has nothing left to write. No rank waits for another here."""

    def finish_save(self, timeout: float) -> float:
        """Wait up to `timeout` seconds until every rank has written its part; the seconds that writing took, of the slowest.
        Raises CheckpointError on every rank when one failed, or is not done in time: no file of that save counts."""

    def load(self, folder: str) -> None:
        """Model, optimizer and random generators as they were saved, by any number of ranks. Before the first `train`. Raises
        CheckpointError on every rank when one cannot."""

    def close(self) -> None:
        """Leave the process group."""


class StateFiles(Protocol):
    """How an engine's state lies in a folder: named tensors, in any number of files. `asyncrl.checkpoint.dcp` has it."""

    def write(self, folder: str, tensors: Mapping[str, torch.Tensor], group: ProcessGroup | None) -> None:
        """Blocking, on every rank of `group` (None: this process alone): of a DTensor this rank's shard, another tensor once.
        Raises CheckpointError on every rank when one fails."""

    def describe(self, folder: str) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype such as ``float32``) by name. Raises CheckpointError for a folder that is damaged."""

    def read(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Blocking, each rank for itself: fill these tensors in place. Raises CheckpointError."""


class EngineLauncher(Protocol):
    """Brings one rank's engine up in two blocking moves, because ranks learn of each other only when all of them are there."""

    def prepare(self) -> str:
        """What needs no peers (loading the model). Rank 0 of several opens a meeting point and returns its address, others ""."""

    def join(self, meeting_point: str) -> TrainingEngine:
        """Meet the other ranks at rank 0's address."""
