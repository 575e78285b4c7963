"""Scores for evaluation, from a Reward front that may be lost meanwhile and have another in its place.

score ─▶ which front? ─▶ its `score` ─┬─ answered ─▶ scores
           ▲                          └─ another front answers at that address ─┐
           └────────────────────── the same samples again ◀─────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from asyncrl.errors import DeadlineExceeded
from asyncrl.services.tasks import cancel
from asyncrl.transport.rpc import RpcClient

log = logging.getLogger(__name__)

Items = Sequence[Mapping[str, Any]]
LOOK_SECONDS = 2.0


class Scorer(Protocol):
    """Scores responses outside the pipeline, for evaluation."""

    async def score(self, items: Items, timeout: float) -> list[dict[str, Any]]:
        """items: as `asyncrl.rewards.item_of` makes them. One `{"score": float | None, "failure": str | None}`
        each, in order. Raises TransportError when the reward service does not answer within `timeout` seconds, the time in which
        it is away aside."""


class RpcScorer:
    """The Reward service's `score`. away_seconds: how long there may be no front at all; give it the time that a restart may
    take."""

    def __init__(self, client: RpcClient, *, away_seconds: float = 240.0, look_seconds: float = LOOK_SECONDS):
        self._client, self._away_seconds, self._look_seconds = client, away_seconds, look_seconds

    async def score(self, items: Items, timeout: float) -> list[dict[str, Any]]:
        while True:
            front = await self._front()
            call = asyncio.ensure_future(self._client.call("score", timeout=timeout, items=[dict(item) for item in items]))
            replaced = asyncio.ensure_future(self._until_replaced(front))
            try:
                await asyncio.wait((call, replaced), return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    scores: list[dict[str, Any]] = call.result()
                    return scores
                replaced.result()
                log.warning(
                    "the Reward front was lost with %d samples of an evaluation: they go to the one in its place", len(items)
                )
            finally:
                await cancel([call, replaced])

    async def _until_replaced(self, front: str) -> None:
        while True:
            await asyncio.sleep(self._look_seconds)
            if await self._front() != front:
                return

    async def _front(self) -> str:
        """Which front answers now. Raises DeadlineExceeded when none does for `away_seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._away_seconds
        while True:
            try:
                incarnation: str = await self._client.call("incarnation", timeout=self._look_seconds)
                return incarnation
            except DeadlineExceeded:
                if loop.time() >= deadline:
                    raise
