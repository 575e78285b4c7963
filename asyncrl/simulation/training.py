"""A trainer without a machine: it counts what it is given, and a step takes as long as it is told, in virtual seconds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import CheckpointError
from asyncrl.protocols import StepOutcome, TrainBatch

STATE_FILE = "engine.json"


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
    """A TrainingEngine of one rank. `step_seconds` prices a batch; `outcome` answers for it (default: every update is made);
    a save takes `save_seconds` and holds the optimizer for `held_seconds`; `save_failure(folder)` says why it fails, or "".

    Its state is the number of groups that it has trained.
    """

    blocking: VirtualBlocking = field(default_factory=VirtualBlocking)
    step_seconds: Callable[[TrainBatch], float] = lambda batch: 1.0
    outcome: Callable[[TrainBatch], StepOutcome] | None = None
    batches: list[TrainBatch] = field(default_factory=list)
    keep_batches: bool = True
    save_seconds: float = 0.2
    held_seconds: float = 0.01
    save_failure: Callable[[str], str] = lambda folder: ""
    trained: int = 0
    saves: list[str] = field(default_factory=list)
    loaded: str | None = None
    _save: tuple[str, float] | None = None

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None, "rank 0 has the payload"
        return payload

    def judge(self, batch: TrainBatch, temperature: float, rounded: bool) -> npt.NDArray[np.float32]:
        """As the servers said."""
        return np.concatenate([group.log_probs[group.loss_mask] for group in batch.groups])

    def train(self, batch: TrainBatch) -> StepOutcome:
        check_batch(batch)
        self.blocking.spend(self.step_seconds(batch))
        self.trained += len(batch.groups)
        if self.keep_batches:
            self.batches.append(batch)
        if self.outcome is not None:
            return self.outcome(batch)
        return StepOutcome(updates=batch.epochs * len(batch.mini_batches), bad_updates=0, metrics={"grad/norm": 1.0})

    def begin_save(self, folder: str) -> float:
        assert self._save is None, "a save is finished before the next begins"
        self.blocking.spend(self.held_seconds)
        self.saves.append(folder)
        self._save = (folder, self._now() + self.held_seconds + self.save_seconds)
        (Path(folder) / STATE_FILE).write_text(json.dumps({"trained": self.trained}))
        return self.held_seconds

    def save_done(self) -> bool:
        return self._save is None or self._now() >= self._save[1]

    def finish_save(self, timeout: float) -> float:
        assert self._save is not None, "a save was begun"
        (folder, ready), self._save = self._save, None
        left = ready - self._now()
        self.blocking.spend(max(0.0, min(left, timeout)))
        if left > timeout:
            raise CheckpointError("this checkpoint was not written in time: raise checkpoint.timeout_seconds")
        if failure := self.save_failure(folder):
            raise CheckpointError(failure)
        return self.save_seconds

    def load(self, folder: str) -> None:
        try:
            self.trained = json.loads((Path(folder) / STATE_FILE).read_text())["trained"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder} holds no state of this engine: {error}") from error
        self.loaded = folder

    def close(self) -> None:
        """Nothing to give up."""

    def _now(self) -> float:
        """The loop's time, virtual or not; the machine's in a thread of its own."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()


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
