"""A trainer alone in virtual time: its queue is a list that the test fills, its ledger is the real one without a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.checkpoint import CheckpointInfo
from asyncrl.errors import StreamClosed
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.messages import GroupId, ScoredGroup
from asyncrl.protocols import Delivery, Dispatch, PromptCursor, TrainingEngine
from asyncrl.services.service import AddressBook
from asyncrl.services.trainer import TrainerParts, TrainerService
from asyncrl.services.trainer.parts import LeaderParts
from asyncrl.simulation.loop import VirtualClock, run_virtual
from asyncrl.simulation.training import FakeLauncher, FakeTrainingEngine, VirtualBlocking
from asyncrl.tracking.memory import MemoryTracker
from tests.engines.training import config

CURSOR = PromptCursor(epoch=0, position=0, num_rows=None, seed=0, shuffle=False)


def scored(row: int, *, rewards: Sequence[float] = (0.0, 1.0), versions: Sequence[int] = (0, 0), attempt: int = 0) -> ScoredGroup:
    """A group of one-token answers, one per reward."""
    size = len(rewards)
    return ScoredGroup(
        id=GroupId(0, row, attempt),
        group_size=size,
        start_version=min(versions),
        prompt_tokens=np.array([2, 3], np.int32),
        members=np.arange(size, dtype=np.int32),
        lengths=np.ones(size, np.int32),
        response_tokens=np.full(size, 4, np.int32),
        loss_mask=np.ones(size, bool),
        log_probs=np.full(size, -1.0, np.float32),
        versions=np.array(versions, np.int32),
        rewards=np.array(rewards, np.float32),
        components={"exact_match": np.array(rewards, np.float32)},
        finish_reasons=["stop"] * size,
        failures=["reward raised: no" if np.isnan(reward) else None for reward in rewards],
        prompt=f"prompt {row}",
        responses=[f"answer {member}" for member in range(size)],
    )


class ListReceiver:
    """Delivers what was put, in order; `close_stream` ends the topic."""

    def __init__(self) -> None:
        self._waiting: list[Delivery] = []
        self._arrived = asyncio.Event()
        self._ended = self.closed = False
        self.asked: list[int] = []

    def put(self, *groups: ScoredGroup, redelivered: bool = False) -> None:
        self._waiting += [Delivery(group, redelivered) for group in groups]
        self._arrived.set()

    def close_stream(self) -> None:
        self._ended = True
        self._arrived.set()

    async def receive(self, *, max_items: int, timeout: float) -> list[Delivery]:
        self.asked.append(max_items)
        if not self._waiting and not self._ended:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        if not self._waiting:
            raise StreamClosed("the topic has ended")
        taken, self._waiting = self._waiting[:max_items], self._waiting[max_items:]
        return taken

    async def settle(self, ids: Sequence[str]) -> None:
        raise AssertionError("scored groups are settled by the ledger")

    async def close(self) -> None:
        self.closed = True


class ListPublisher:
    """Remembers what was staged; every version is confirmed at once."""

    def __init__(self) -> None:
        self.registered = self.reannounced = self.closed = False
        self.staged: list[tuple[int, int]] = []

    def register(self) -> None:
        self.registered = True

    def reannounce(self) -> None:
        self.reannounced = True

    def acquire(self, version: int) -> int:
        return version % 2

    def stage(self, version: int, slot: int) -> float:
        assert self.registered
        self.staged.append((version, slot))
        return 0.0

    def latest(self) -> Mapping[str, float]:
        return {"sync/pause_ms": 3.0}

    def wait_confirmed(self, version: int, timeout: float) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class NotedLedger(LocalLedgerClient):
    """The real one, and the checkpoints that it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoints: list[int] = []
        self.at_sync: Callable[[], None] = lambda: None

    async def sync(self) -> None:
        await super().sync()
        self.at_sync()

    async def checkpointed(self, step: int) -> None:
        await super().checkpointed(step)
        self.checkpoints.append(step)


class TrainerWorld:
    """One trainer with everything around it. Give it groups with `arrive`, then `run`."""

    def __init__(
        self,
        run_dir: Path,
        *,
        resume: CheckpointInfo | None = None,
        seed: int = 0,
        times: Mapping[str, float] | None = None,
        probes: Callable[[], Awaitable[Mapping[str, Sequence[ScoredGroup]]]] | None = None,
        **sections: dict[str, Any],
    ):
        """times: what the service is told of its launch; probes: what servers answer to the self-test."""
        self.probes = probes
        training = {"steps": 3, "groups_per_step": 2, "filter": "drop", **sections.pop("training", {})}
        rollout = {"max_staleness": 1, "group_size": 2, **sections.pop("rollout", {})}
        self.config = config(training=training, rollout=rollout, **sections).model_copy(update={"seed": seed})
        self.run_dir = run_dir
        self.ledger = NotedLedger()
        self.evaluations: dict[int, float] = {}
        self.receiver, self.publisher, self.tracker = ListReceiver(), ListPublisher(), MemoryTracker()
        self.blocking = VirtualBlocking()
        self.engine = FakeTrainingEngine(self.blocking)
        self.clock = VirtualClock()
        self.service = TrainerService(
            self.config,
            run_dir,
            0,
            launcher=FakeLauncher(self.engine),
            connect=self.connect,
            clock=self.clock,
            run_blocking=self.blocking,
            incarnation=3,
            resume=resume,
            **(times or {}),
        )

    async def connect(self, book: AddressBook, engine: TrainingEngine) -> TrainerParts:
        return TrainerParts(self.publisher, LeaderParts(self.receiver, self.ledger, self.tracker, self.evaluated, self.probes))

    async def evaluated(self, name: str) -> Mapping[int, float]:
        assert name == "eval/score"
        return self.evaluations

    async def dispatch(self, *groups: ScoredGroup) -> None:
        """These start and are on their way."""
        await self.ledger.dispatch([Dispatch(group.id, group.start_version) for group in groups], CURSOR)

    async def arrive(self, *groups: ScoredGroup, started: bool = False) -> None:
        """These were scored and wait in the queue."""
        if not started:
            await self.dispatch(*groups)
        self.ledger.queue([group.id for group in groups])
        self.receiver.put(*groups)

    async def run(self) -> None:
        await self.service.run({})

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / f"{name}.jsonl").read_text().splitlines()]

    def ends(self) -> dict[str, int]:
        counts = self.ledger.attempts.counts()
        return {name: count for name, count in counts.items() if count and name != "dispatched"}


def virtual(story: Any) -> None:
    """Run a coroutine in virtual time, an hour of it at most."""
    run_virtual(story, limit_seconds=3600)
