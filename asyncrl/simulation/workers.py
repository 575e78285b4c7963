"""Reward workers on a virtual clock: processes that score, say that they live, die with what they are at, and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.errors import RemoteError, StreamClosed
from asyncrl.services.reward import RewardFront
from asyncrl.services.tasks import cancel
from asyncrl.simulation.processes import never

FIELDS = ("prompt", "response", "ground_truth", "extra_info")
ANNOUNCE_SECONDS = 1.0

Item = Mapping[str, Any]


class Workers:
    """Rows `reward/0` …. front(): the Reward front that is up, or None. lethal(item): whether a sample kills its worker."""

    def __init__(
        self,
        count: int,
        *,
        front: Callable[[], RewardFront | None],
        reward: Callable[[Item], float | None],
        score_seconds: float,
        lethal: Callable[[Item], bool],
        back_after: float,
    ):
        self.front, self.reward, self.score_seconds, self.lethal = front, reward, score_seconds, lethal
        self._back_after = back_after
        self.by_address = {name: _Worker(self, name) for name in (f"reward/{index}" for index in range(count))}

    async def run(self) -> None:
        """They live until this is cancelled."""
        await asyncio.gather(*(worker.announce() for worker in self.by_address.values()))

    def connect(self, address: str) -> WorkerLink:
        return WorkerLink(self.by_address[address])

    def kill(self, name: str, back_after: float | None = None) -> bool:
        return self.by_address[name].kill(self._back_after if back_after is None else back_after)


class _Worker:
    def __init__(self, workers: Workers, name: str):
        self.workers, self.name = workers, name
        self.lives = 1
        self.is_up = True
        self._changed = asyncio.Event()

    @property
    def incarnation(self) -> str:
        return str(self.lives)

    def kill(self, back_after: float) -> bool:
        if not self.is_up:
            return False
        self.is_up = False
        asyncio.get_running_loop().call_later(back_after, self._rise)
        return True

    def _rise(self) -> None:
        self.is_up = True
        self.lives += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def announce(self) -> None:
        while True:
            front = self.workers.front()
            if self.is_up and front is not None:
                await front.register(
                    worker=self.name,
                    incarnation=self.incarnation,
                    address=self.name,
                    fields=FIELDS,
                    is_serial=True,
                    slots=1,
                )
            try:
                async with asyncio.timeout(ANNOUNCE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def score(self, items: Sequence[Item], incarnation: str) -> dict[str, Any]:
        if not self.is_up:
            await never()
        if incarnation != self.incarnation:
            raise RemoteError("score", "RunError", f"{self.name} was started again")
        await asyncio.sleep(self.workers.score_seconds * len(items))
        if any(map(self.workers.lethal, items)):
            self.workers.kill(self.name)
        if not self.is_up or incarnation != self.incarnation:
            await never()
        scores = [self.workers.reward(item) for item in items]
        answers: list[tuple[Any, ...]] = [
            (score, {}, {}, None if score is not None else "the reward function raised") for score in scores
        ]
        return {"seconds": self.workers.score_seconds * len(items), "scores": answers}


class WorkerLink:
    """The front's line to a worker."""

    def __init__(self, worker: _Worker):
        self._worker = worker
        self._closed = asyncio.Event()

    async def call(self, method: str, *, timeout: float, **params: Any) -> Any:
        assert method == "score", method
        call = asyncio.ensure_future(self._worker.score(params["items"], params["incarnation"]))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((call, closed), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise StreamClosed("the line was closed")
        finally:
            await cancel([call, closed])

    async def close(self) -> None:
        self._closed.set()
