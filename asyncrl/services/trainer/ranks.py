"""The ranks as their leader sees them: every command reaches all of them before rank 0 carries it out itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import CheckpointError, TransportError
from asyncrl.protocols import StepOutcome, TrainBatch, TrainingEngine, WeightPublisher
from asyncrl.services.trainer.commands import (
    Command,
    FinishSave,
    Judge,
    Load,
    Publish,
    Save,
    Stop,
    Tick,
    Train,
    decode_command,
    encode_command,
)
from asyncrl.services.trainer.parts import RunBlocking

log = logging.getLogger(__name__)


class Ranks:
    """Rank 0's hand on the engine and the publisher of every rank. Calls are made one after the other.

    Once a call on the engine has raised, the ranks are out of step: nothing more is said to them, and each ends by its own error.
    A CheckpointError alone is raised on every rank alike, and leaves them in step.
    """

    def __init__(self, engine: TrainingEngine, publisher: WeightPublisher, run_blocking: RunBlocking):
        self._engine, self._publisher, self._run_blocking = engine, publisher, run_blocking
        self._in_step = True

    async def tick(self) -> None:
        await self._tell(Tick())

    async def train(self, batch: TrainBatch) -> StepOutcome:
        await self._tell(Train(batch))
        outcome: StepOutcome = await self._together(self._engine.train, batch)
        return outcome

    async def judge(self, batch: TrainBatch, temperature: float, *, rounded: bool = False) -> npt.NDArray[np.float32]:
        """Log-probs of the batch's tokens under the present weights."""
        await self._tell(Judge(batch, temperature, rounded))
        log_probs: npt.NDArray[np.float32] = await self._together(self._engine.judge, batch, temperature, rounded)
        return log_probs

    async def publish(self, version: int) -> None:
        """Stage `version` on every rank, in the slot that rank 0 was given."""
        if self.world_size == 1:
            await self._run_blocking(self._acquire_and_stage, version)
            return
        slot: int = await self._run_blocking(self._publisher.acquire, version)
        await self._tell(Publish(version, slot))
        await self._run_blocking(self._publisher.stage, version, slot)

    async def begin_save(self, folder: str) -> float:
        """Seconds that the optimizer was held."""
        await self._tell(Save(folder))
        held: float = await self._together(self._engine.begin_save, folder)
        return held

    def save_done(self) -> bool:
        """Whether rank 0 has written its part, which it has when every rank has, or a moment before."""
        return self._engine.save_done()

    async def finish_save(self, timeout: float) -> float:
        """Seconds that writing took. Raises CheckpointError for a save that failed."""
        await self._tell(FinishSave(timeout))
        seconds: float = await self._together(self._engine.finish_save, timeout)
        return seconds

    async def load(self, folder: str) -> None:
        """Raises CheckpointError for a checkpoint that does not fit."""
        await self._tell(Load(folder))
        await self._together(self._engine.load, folder)

    @property
    def world_size(self) -> int:
        return self._engine.world_size

    def _acquire_and_stage(self, version: int) -> None:
        self._publisher.stage(version, self._publisher.acquire(version))

    async def dismiss(self, reason: str) -> None:
        """The followers' end, where they can still be told."""
        if not self._in_step:
            return
        try:
            await self._tell(Stop(reason))
        except TransportError as error:
            log.warning("the other ranks could not be told to stop: %s", error)

    async def _tell(self, command: Command) -> None:
        if self._engine.world_size > 1:
            await self._together(self._engine.broadcast, encode_command(command))

    async def _together(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """A call in which every rank takes part."""
        self._in_step = False
        try:
            result = await self._run_blocking(function, *args)
        except CheckpointError:
            self._in_step = True
            raise
        self._in_step = True
        return result


async def follow(engine: TrainingEngine, publisher: WeightPublisher, run_blocking: RunBlocking) -> None:
    """Every rank but 0: carry out rank 0's commands until it says stop. Raises TransportError when rank 0 is gone."""
    while True:
        command = decode_command(await run_blocking(engine.broadcast, None))
        match command:
            case Train(batch):
                await run_blocking(engine.train, batch)
            case Judge(batch, temperature, rounded):
                await run_blocking(engine.judge, batch, temperature, rounded)
            case Publish(version, slot):
                await run_blocking(publisher.stage, version, slot)
            case Save(folder):
                await run_blocking(engine.begin_save, folder)
            case FinishSave(timeout):
                await _unless_it_failed(engine, run_blocking, engine.finish_save, timeout)
            case Load(folder):
                await _unless_it_failed(engine, run_blocking, engine.load, folder)
            case Stop(reason):
                log.info("rank %d stops: %s", engine.rank, reason or "the work is over")
                return
            case Tick():
                pass


async def _unless_it_failed(engine: TrainingEngine, run_blocking: RunBlocking, call: Callable[..., Any], /, *args: Any) -> None:
    """Every rank has the same error; rank 0 decides what it means."""
    try:
        await run_blocking(call, *args)
    except CheckpointError as error:
        log.warning("rank %d: %s", engine.rank, error)
