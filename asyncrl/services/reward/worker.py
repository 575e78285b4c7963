"""A reward worker: row `reward/<j>`.

loop        consumes          waits for             is unblocked by
_announce   -                 a second to pass      the clock
rpc score   a batch           its executor          the functions, or their time limits

User functions run in child processes of this one (`asyncrl.rewards.executor`), so this process answers at all times, and says so
to the front once a second. The front gives samples to those it hears.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.clock import Clock
from asyncrl.errors import RunError, TransportError
from asyncrl.rewards import Item
from asyncrl.rewards.executor import Executor
from asyncrl.services.reward.front import Link
from asyncrl.services.service import NOWHERE, AddressBook, service_rpc
from asyncrl.services.tasks import first_to_end
from asyncrl.transport.rpc import RpcClient

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 1.0
ANSWER_SECONDS = 5.0


class RewardWorker:
    """concurrency: `reward.concurrency`, the samples that it takes at once when functions are async. silence_seconds: a front
    that is away for longer does not come back; until then the worker waits for it, or for another in its place."""

    def __init__(
        self,
        index: int,
        executor: Executor,
        *,
        concurrency: int,
        clock: Clock,
        connect: Callable[[str], Link] = RpcClient,
        silence_seconds: float = 240.0,
    ):
        self.name = f"reward/{index}"
        self._executor, self._concurrency, self._clock, self._connect = executor, concurrency, clock, connect
        self._silence_seconds = silence_seconds
        self._incarnation = uuid.uuid4().hex
        self._address = self.name  # until `start` has bound a socket
        self._stop = asyncio.Event()
        self._state = "starting"
        self._samples = 0
        self._busy_seconds = 0.0
        self._rpc = service_rpc(self, {"score": self.score})

    async def start(self, earlier: Mapping[str, str] = NOWHERE) -> dict[str, str]:
        """Loads the functions, so that one that cannot be loaded fails the start with its reason."""
        await self._executor.start()
        self._address = await self._rpc.start(earlier.get("rpc"))
        return {"rpc": self._address}

    async def run(self, book: AddressBook) -> None:
        front = self._connect(book["reward"]["rpc"])
        self._state = "running"
        try:
            await first_to_end(self._announce(front), self._stop.wait())
        finally:
            self._state = "done"
            await front.close()
            await self._executor.close()
            await self._rpc.close()

    async def stop(self) -> None:
        self._stop.set()

    def status(self) -> dict[str, Any]:
        return {
            "state": self._state,
            "version": None,
            "samples": self._samples,
            "busy_s": round(self._busy_seconds, 3),
            **self._executor.counts(),
        }

    def summary(self) -> dict[str, Any]:
        """Nothing of its own: the front sums up."""
        return {}

    async def score(self, *, items: Sequence[Item], incarnation: str) -> dict[str, Any]:
        """{"scores": [[reward, components, metrics, failure] a sample, in order], "seconds": how long it took}. Raises RunError
        for samples that were meant for another life of this worker: the front hands those out anew."""
        if incarnation != self._incarnation:
            raise RunError(f"{self.name} was started again: these samples were for the one before")
        began = self._clock.now()
        scores = await self._executor.run(items)
        seconds = self._clock.now() - began
        self._samples += len(items)
        self._busy_seconds += seconds
        return {"scores": scores, "seconds": seconds}

    async def _announce(self, front: Link) -> None:
        heard = self._clock.now()
        while True:
            try:
                await front.call("register", timeout=ANSWER_SECONDS, **self._view())
                heard = self._clock.now()
            except TransportError as error:
                if self._clock.now() - heard > self._silence_seconds:
                    raise RunError(f"the reward front did not answer for {self._silence_seconds:.0f} s: {error}") from error
                log.warning("the reward front did not answer: %s", error)
            await asyncio.sleep(ANNOUNCE_SECONDS)

    def _view(self) -> dict[str, Any]:
        return {
            "worker": self.name,
            "incarnation": self._incarnation,
            "address": self._address,
            "fields": list(self._executor.fields),
            "is_serial": self._executor.is_serial,
            "slots": self._concurrency,
        }
