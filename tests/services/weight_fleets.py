"""Weight sync for the conformance suite, real and simulated, behind one face."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import zmq

from asyncrl.clock import SystemClock
from asyncrl.protocols.weights import Fleet, WeightPublisher
from asyncrl.services.parameter_sync.service import ParameterSyncService, SyncSettings
from asyncrl.services.tasks import cancel
from asyncrl.simulation.weights import SimulatedSync
from asyncrl.weight_sync.channel import staged_line
from asyncrl.weight_sync.fleet_client import RpcFleet
from asyncrl.weight_sync.publisher import ShmPublisher
from asyncrl.weight_sync.receiver import WeightReceiver
from tests.weight_sync.stand_in import StandInTarget, a_model

NAME = "inference/0"
_runs = itertools.count()


class Face(Protocol):
    """One server. `hold` keeps its confirmations back until `let_go`; `call` runs a publisher's blocking method."""

    fleet: Fleet
    service: ParameterSyncService

    async def start(self) -> None: ...
    def publisher(self, incarnation: int = 1) -> WeightPublisher: ...
    def hold(self) -> None: ...
    def let_go(self) -> None: ...
    async def restart(self) -> None: ...
    async def close(self) -> None: ...

    @property
    def call(self) -> Callable[..., Awaitable[Any]]: ...


class RealFace:
    """Sockets, threads and shared memory, in one process."""

    call = staticmethod(asyncio.to_thread)

    def __init__(self, settings: SyncSettings, record: Path | None = None):
        self.model, self.record = a_model(seed=1), record
        self.target = StandInTarget(self.model)
        self.receiver = WeightReceiver(self.target)
        self.settings = settings
        self.service = self._service()
        self.publishers: list[ShmPublisher] = []
        self.run_id = f"test{os.getpid()}face{next(_runs)}"

    async def start(self) -> None:
        self.weights = self.receiver.start()
        self.book = {NAME: {"http": f"http://{NAME}", "weights": self.weights}}
        self.address = (await self.service.start())["rpc"]
        self.running = asyncio.create_task(self.service.run(self.book))
        self.fleet = RpcFleet(self.address)

    async def lose_service(self) -> None:
        """As if its process had been killed: nobody who waits for it is answered."""
        await cancel([self.running])

    async def start_service_again(self) -> None:
        """A new one at the old address, which knows the book and nothing else."""
        self.service = self._service()
        async with asyncio.timeout(10):
            while True:
                try:
                    await self.service.start({"rpc": self.address})
                    break
                except zmq.ZMQError:  # the old socket is being closed
                    await asyncio.sleep(0.01)
        self.running = asyncio.create_task(self.service.run(self.book))

    def _service(self) -> ParameterSyncService:
        return ParameterSyncService(self.settings, connect=staged_line, clock=SystemClock(), record=self.record)

    def publisher(self, incarnation: int = 1) -> ShmPublisher:
        self.publishers.append(
            ShmPublisher(
                self.model.items(), run_id=self.run_id, address=self.address, incarnation=incarnation, bucket_bytes=600,
                timeout_seconds=20,
            )
        )  # fmt: skip
        return self.publishers[-1]

    def hold(self) -> None:
        self.target.gate.clear()

    def let_go(self) -> None:
        self.target.gate.set()

    async def restart(self) -> None:
        await asyncio.to_thread(self.receiver.close)
        self.target = StandInTarget(self.model)
        self.receiver = WeightReceiver(self.target, bind=self.weights)
        self.receiver.start()

    async def close(self) -> None:
        self.let_go()
        for publisher in self.publishers:
            await asyncio.to_thread(publisher.close)
        await self.fleet.close()
        await self.service.stop()
        await self.running
        await asyncio.to_thread(self.receiver.close)


class SimulatedFace:
    """The simulator's."""

    def __init__(self, settings: SyncSettings):
        self.sync = SimulatedSync(SystemClock(), lag=lambda server, version: 0.0, settings=settings)
        self.service, self.fleet = self.sync.service, self.sync.fleet()

    @staticmethod
    async def call(method: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0.02)
        return method(*args)

    async def start(self) -> None:
        await self.sync.start()

    def publisher(self, incarnation: int = 1) -> WeightPublisher:
        return self.sync.publisher(incarnation=incarnation)

    def hold(self) -> None:
        self.sync.hold(NAME)

    def let_go(self) -> None:
        self.sync.let_go(NAME)

    async def restart(self) -> None:
        self.sync.receivers[NAME].restart()

    async def close(self) -> None:
        self.let_go()
        await self.sync.close()
