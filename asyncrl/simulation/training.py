"""A trainer without a machine: it counts what it is given, and a step takes as long as it is told, in virtual seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.protocols import StepOutcome, TrainBatch


class VirtualBlocking:
    """Stands in for `asyncio.to_thread`: runs the call at once, then lets the virtual seconds pass that the call has spent."""

    def __init__(self) -> None:
        self._spent = 0.0

    def spend(self, seconds: float) -> None:
        """Called by a fake inside a blocking call: this is how long it would have taken."""
        self._spent += seconds

    async def __call__(self, function: Callable[..., Any], /, *args: Any) -> Any:
        result = function(*args)
        seconds, self._spent = self._spent, 0.0
        await asyncio.sleep(seconds)
        return result


@dataclass
class FakeTrainingEngine:
    """A TrainingEngine of one rank. `step_seconds` prices a batch; `outcome` answers for it (default: every update is made)."""

    blocking: VirtualBlocking = field(default_factory=VirtualBlocking)
    step_seconds: Callable[[TrainBatch], float] = lambda batch: 1.0
    outcome: Callable[[TrainBatch], StepOutcome] | None = None
    batches: list[TrainBatch] = field(default_factory=list)
    keep_batches: bool = True

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None, "rank 0 has the payload"
        return payload

    def train(self, batch: TrainBatch) -> StepOutcome:
        check_batch(batch)
        self.blocking.spend(self.step_seconds(batch))
        if self.keep_batches:
            self.batches.append(batch)
        if self.outcome is not None:
            return self.outcome(batch)
        return StepOutcome(updates=batch.epochs * len(batch.mini_batches), bad_updates=0, metrics={"grad/norm": 1.0})

    def close(self) -> None:
        """Nothing to give up."""


@dataclass
class FakeLauncher:
    """An EngineLauncher of a ready-made engine."""

    engine: FakeTrainingEngine

    def prepare(self) -> str:
        return ""

    def join(self, meeting_point: str) -> FakeTrainingEngine:
        return self.engine


def check_batch(batch: TrainBatch) -> None:
    """What every engine may count on: each group in exactly one mini-batch."""
    chosen: Sequence[int] = sorted(index for cut in batch.mini_batches for index in cut)
    assert chosen == list(range(len(batch.groups))), f"mini-batches {batch.mini_batches} of {len(batch.groups)} groups"
