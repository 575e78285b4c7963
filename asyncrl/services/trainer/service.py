"""The service around leader and follower. Its map is in the package's docstring."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.checkpoint import CheckpointInfo
from asyncrl.clock import Clock
from asyncrl.config.schema import Config
from asyncrl.protocols import EngineLauncher, TrainingEngine, WeightPublisher
from asyncrl.services.service import NOWHERE, AddressBook, service_rpc
from asyncrl.services.tasks import OneThread
from asyncrl.services.trainer.leader import Leader
from asyncrl.services.trainer.parts import Connect, RunBlocking, TrainerParts
from asyncrl.services.trainer.ranks import follow
from asyncrl.transport.rpc import RpcServer

LEADER_ROW = "trainer/0"


class TrainerService:
    """One rank. `launcher` brings its engine up, `connect` makes the other parts once every address is known.

    Addresses: ``rpc``; rank 0 of several also ``meeting_point``, where the process group forms.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        rank: int,
        *,
        launcher: EngineLauncher,
        connect: Connect,
        clock: Clock,
        run_blocking: RunBlocking | None = None,
        incarnation: int = 1,
        resume: CheckpointInfo | None = None,
        launched: float | None = None,
        earlier_seconds: float = 0.0,
    ):
        """incarnation: of this start of the trainer; resume: the checkpoint that it goes on from; launched: wall time at which
        the launch began (None: now), and what those before it took. run_blocking: None for a thread of its own."""
        self.name = f"trainer/{rank}"
        self._config, self._run_dir, self._rank = config, run_dir, rank
        self._launcher, self._connect, self._clock = launcher, connect, clock
        self._run_blocking: RunBlocking = run_blocking or OneThread("engine")
        self._run_beside: RunBlocking = run_blocking or asyncio.to_thread  # what a call under way may wait for
        self._incarnation, self._resume = incarnation, resume
        self._began_wall = (clock.wall() if launched is None else launched) - earlier_seconds
        self._stopping = asyncio.Event()
        self._stop_by: float | None = None
        self._meeting_point: str | None = None
        self._leader: Leader | None = None
        self._publisher: WeightPublisher | None = None
        self._state = "starting"
        self._rpc: RpcServer | None = None

    async def start(self, earlier: Mapping[str, str] = NOWHERE) -> dict[str, str]:
        self._rpc = service_rpc(self, {"held": self.held, "reannounce": self.reannounce})
        address = await self._rpc.start(earlier.get("rpc"))
        await self._prepare()
        return {"rpc": address, **({"meeting_point": self._meeting_point} if self._meeting_point else {})}

    async def run(self, book: AddressBook) -> None:
        await self._prepare()
        self._state = "joining"
        meeting_point = book.get(LEADER_ROW, {}).get("meeting_point", self._meeting_point or "")
        engine: TrainingEngine = await self._run_blocking(self._launcher.join, meeting_point)
        try:
            parts = await self._connect(book, engine)
            try:
                await self._work(engine, parts)
            finally:
                await self._close(parts)
        finally:
            engine.close()
            self._state = "done"
            if self._rpc is not None:
                await self._rpc.close()

    async def stop(self, seconds: float | None = None) -> None:
        """Rank 0 ends after its present step, saves, and dismisses the others. seconds: how long it may take (the last checkpoint
        is given up after them); None: cluster.stop_grace_seconds from the end of the step."""
        if seconds is not None:
            self._stop_by = self._clock.now() + seconds
            if self._leader is not None:
                self._leader.stop_by = self._stop_by
        self._stopping.set()

    def held(self) -> list[str]:
        """Ids of the scored groups in this trainer's hands: its pool, and the step that is being made. Rank 0 holds them."""
        return [str(id) for id in self._leader.held()] if self._leader else []

    async def reannounce(self) -> None:
        """A new ParameterSync stands at the old address: tell it what this rank has."""
        if self._publisher is not None:
            await self._run_beside(self._publisher.reannounce)

    def status(self) -> dict[str, Any]:
        return self._leader.status() if self._leader and self._state == "running" else {"state": self._state, "version": None}

    def summary(self) -> dict[str, Any]:
        return self._leader.summary() if self._leader else {}

    async def _prepare(self) -> None:
        if self._meeting_point is None:
            self._meeting_point = await self._run_blocking(self._launcher.prepare)
            self._state = "ready"

    async def _work(self, engine: TrainingEngine, parts: TrainerParts) -> None:
        self._publisher = parts.publisher
        await self._run_blocking(parts.publisher.register)
        self._state = "running"
        if self._rank:
            await follow(engine, parts.publisher, self._run_blocking)
            return
        self._leader = Leader(
            self._config,
            self._run_dir,
            engine,
            parts,
            clock=self._clock,
            run_blocking=self._run_blocking,
            stopping=self._stopping,
            incarnation=self._incarnation,
            resume=self._resume,
            began_wall=self._began_wall,
        )
        self._leader.stop_by = self._stop_by
        await self._leader.lead()

    async def _close(self, parts: TrainerParts) -> None:
        await self._run_blocking(parts.publisher.close)
        if parts.leader is not None:
            await parts.leader.receiver.close()
            await parts.leader.tracker.close()
        for close in parts.closers:
            await close()
