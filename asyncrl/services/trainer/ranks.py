"""The ranks as their leader sees them: every command reaches all of them before rank 0 carries it out itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from asyncrl.errors import TransportError
from asyncrl.protocols import StepOutcome, TrainBatch, TrainingEngine, WeightPublisher
from asyncrl.services.trainer.commands import Command, Publish, Stop, Tick, Train, decode_command, encode_command
from asyncrl.services.trainer.parts import RunBlocking

log = logging.getLogger(__name__)


class Ranks:
    """Rank 0's hand on the engine and the publisher of every rank. Calls are made one after the other.

    Once a call on the engine has raised, the ranks are out of step: nothing more is said to them, and each ends by its own error.
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

    async def publish(self, version: int) -> None:
        """Stage `version` on every rank, in the slot that rank 0 was given."""
        slot: int = await self._run_blocking(self._publisher.acquire, version)
        await self._tell(Publish(version, slot))
        await self._run_blocking(self._publisher.stage, version, slot)

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
        result = await self._run_blocking(function, *args)
        self._in_step = True
        return result


async def follow(engine: TrainingEngine, publisher: WeightPublisher, run_blocking: RunBlocking) -> None:
    """Every rank but 0: carry out rank 0's commands until it says stop. Raises TransportError when rank 0 is gone."""
    while True:
        command = decode_command(await run_blocking(engine.broadcast, None))
        match command:
            case Train(batch):
                await run_blocking(engine.train, batch)
            case Publish(version, slot):
                await run_blocking(publisher.stage, version, slot)
            case Stop(reason):
                log.info("rank %d stops: %s", engine.rank, reason or "the work is over")
                return
            case Tick():
                pass
