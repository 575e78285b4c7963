"""Weight sync on a virtual clock: the real ParameterSync over servers that take as long as they are told to.

SimulatedPublisher ──(calls)──▶ ParameterSyncService ──▶ SimulatedReceiver: confirms after `lag(server, version)` seconds
SimulatedFleet     ◀─(calls)──  (real, no socket)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from asyncrl.clock import Clock
from asyncrl.errors import DeadlineExceeded, StaleIncarnation
from asyncrl.protocols.weights import FleetView, PolicyVersion
from asyncrl.services.parameter_sync.service import ParameterSyncService, SyncSettings
from asyncrl.weight_sync.channel import Order, Outcome, Progress
from asyncrl.weight_sync.plan import Shard, TensorSpec, plan_rank
from asyncrl.weight_sync.wire import Checksums, digest_of

Lag = Callable[[str, int], float]
OnCommit = Callable[[str, int], None]
_TENSOR = TensorSpec("weight", (4,), "float32")


class SimulatedSync:
    """ParameterSync with its servers. `lag` gives the seconds from a version's start to its confirmation and may be set at any
    time; `on_commit(server, version)` is called when a server makes a version live."""

    def __init__(
        self,
        clock: Clock,
        *,
        servers: Iterable[str] = ("inference/0",),
        lag: Lag = lambda server, version: 0.0,
        on_commit: OnCommit = lambda server, version: None,
        settings: SyncSettings | None = None,
    ):
        self.lag, self.on_commit = lag, on_commit
        self.receivers = {name: SimulatedReceiver(self, name) for name in servers}
        self.service = ParameterSyncService(
            settings or SyncSettings(), connect=lambda name, http, weights: self.receivers[weights], clock=clock
        )
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bring the service up on the running loop."""
        book = {name: {"http": f"http://{name}", "weights": name} for name in self.receivers}
        self._running = asyncio.create_task(self.service.run(book))
        await asyncio.sleep(0)

    def publisher(self, *, rank: int = 0, world_size: int = 1, incarnation: int = 1) -> SimulatedPublisher:
        return SimulatedPublisher(self.service, rank=rank, world_size=world_size, incarnation=incarnation)

    def fleet(self) -> SimulatedFleet:
        return SimulatedFleet(self.service)

    def hold(self, server: str) -> None:
        """Keep this server's commits back, as a long decode step would."""
        self.receivers[server].gate.clear()

    def let_go(self, server: str) -> None:
        self.receivers[server].gate.set()

    async def close(self) -> None:
        await self.service.stop()
        if self._running is not None:
            await self._running


class SimulatedReceiver:
    """One server's receiver, and ParameterSync's line to it at once.

    `live` is the version that its weights are; `silent` makes it answer nothing; `corrupt_next` slices arrive wrong once.
    """

    def __init__(self, sync: SimulatedSync, name: str):
        self._sync, self.name = sync, name
        self.when_lost: Callable[[], None] = lambda: None
        self.live: PolicyVersion | None = None
        self.silent = False
        self.corrupt_next = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._session = 0
        self._incarnation = 0
        self._digest: str | None = None

    def restart(self) -> None:
        """A new process in its place: it holds no version of the run."""
        self._session += 1
        self.live = self._digest = None
        self.when_lost()

    async def status(self, timeout: float) -> dict[str, Any]:
        if self.silent:
            await asyncio.sleep(timeout)
            raise DeadlineExceeded(f"{self.name} did not answer within {timeout:g} s")
        committed = None if self.live is None else str(self.live)
        return {"session": str(self._session), "committed": committed, "digest": self._digest}

    async def update(self, order: Order, progress: Progress) -> Outcome:
        if order.version.incarnation < self._incarnation:
            raise StaleIncarnation(f"incarnation {order.version.incarnation} is over")
        self._incarnation = order.version.incarnation
        outcome = Outcome(num_bytes=order.plan.num_bytes, verified=True if order.verify else None)
        if self.corrupt_next:
            outcome.refused, self.corrupt_next = self.corrupt_next, 0
            progress.refused(outcome.refused)
        outcome.transfer_seconds = self._sync.lag(self.name, order.version.version)
        try:
            async with asyncio.timeout(order.timeout_seconds):
                await asyncio.sleep(outcome.transfer_seconds)
                progress.transferred()
                await self.gate.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{order.version} did not reach {self.name} within {order.timeout_seconds:g} s") from None
        self.live, self._digest = order.version, digest_of(order.checksums) if order.verify else None
        if not order.verify:
            progress.unverified("unasked")
        self._sync.on_commit(self.name, order.version.version)
        return outcome

    def cancel(self, version: PolicyVersion) -> None:
        """Nothing is under way once `update` was cancelled."""

    async def close(self) -> None:
        """Nothing is held."""


class SimulatedPublisher:
    """protocols.WeightPublisher by direct calls, on the service's loop. Virtual time stands still in a blocking call, so
    `wait_confirmed` answers for now, whatever its timeout."""

    def __init__(self, service: ParameterSyncService, *, rank: int, world_size: int, incarnation: int):
        self._service, self._rank, self._world_size, self._incarnation = service, rank, world_size, incarnation
        self._latest: Mapping[str, float] = {}
        self._contents: dict[int, tuple[int, Checksums | None]] = {}  # by slot
        self.staged: list[int] = []

    def register(self) -> None:
        held = Shard(_TENSOR, (0,), _TENSOR.shape) if self._rank == 0 else Shard(_TENSOR, (0,), (0,), "elsewhere")
        plan = plan_rank([held], rank=self._rank, world_size=self._world_size, bucket_bytes=1024)
        slots = [f"simulated-r{self._rank}-s{slot}" for slot in range(2)]
        contents = [(slot, version, checksums) for slot, (version, checksums) in self._contents.items()]
        self._service.register(self._rank, self._world_size, self._incarnation, plan.to_wire(), slots, contents)

    def reannounce(self) -> None:
        self.register()

    def acquire(self, version: int) -> int:
        slot = self._service.acquire_slot(self._incarnation, version)
        self._contents[slot] = (version, None)
        return slot

    def stage(self, version: int, slot: int) -> float:
        checksums = np.full(1 if self._rank == 0 else 0, version, dtype=np.uint32)
        self._contents[slot] = (version, checksums)
        self._latest = self._service.staged(self._rank, self._incarnation, version, slot, checksums)
        self.staged.append(version)
        return 0.0

    def latest(self) -> Mapping[str, float]:
        return self._latest

    def wait_confirmed(self, version: int, timeout: float) -> bool:
        return self._service.is_confirmed(self._incarnation, version)

    def close(self) -> None:
        """Nothing is held."""


class SimulatedFleet:
    """protocols.Fleet by direct calls."""

    def __init__(self, service: ParameterSyncService):
        self._service = service

    async def watch(self, since: int, timeout: float) -> FleetView:
        return await self._service.watch(since, timeout)
