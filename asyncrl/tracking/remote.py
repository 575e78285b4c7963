"""A service's tracker: what it logs goes to the supervisor, several records in one call.

While the supervisor lives nothing is lost: records stay here, in order, until a call that carried them was answered. A call whose
answer was lost is made again, so a record can arrive twice; it is the same record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from asyncrl.errors import TransportError
from asyncrl.transport.rpc import RpcClient

log = logging.getLogger(__name__)

DELAY_SECONDS = 0.5
CALL_SECONDS = 5.0
CLOSE_SECONDS = 5.0
BATCH_RECORDS = 1000


class Link(Protocol):
    """A way to call the supervisor."""

    async def call(self, method: str, *, timeout: float, **params: Any) -> Any: ...

    async def close(self) -> None: ...


class RemoteTracker:
    """address: the supervisor's ``rpc``. `log` is called on the event loop's thread; a record leaves within `delay_seconds`."""

    def __init__(self, address: str, *, delay_seconds: float = DELAY_SECONDS, connect: Callable[[str], Link] = RpcClient):
        self._link = connect(address)
        self._delay = delay_seconds
        self._records: list[tuple[str, int, dict[str, float]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._closed = False

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        if self._closed:
            log.warning("metrics of %s came after the tracker was closed, and are dropped", axis)
            return
        self._records.append((axis, int(step), {name: float(value) for name, value in metrics.items()}))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def close(self) -> None:
        """Deliver what is held, at most CLOSE_SECONDS long."""
        if self._closed:
            return
        self._closed = True
        self._hurry.set()
        if self._flushing is not None:
            _, late = await asyncio.wait((self._flushing,), timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._records:
            log.warning("the supervisor did not take the last %d records of metrics", len(self._records))
        await self._link.close()

    async def _flush(self) -> None:
        """Wait a moment for more, then send until nothing is left."""
        await self._pause()
        while self._records:
            batch = self._records[:BATCH_RECORDS]
            try:
                await self._link.call("track", timeout=CALL_SECONDS, batch=[list(record) for record in batch])
            except TransportError as error:
                log.warning("the supervisor did not take %d records of metrics, they are sent again: %s", len(batch), error)
                await asyncio.sleep(self._delay)
            else:
                del self._records[: len(batch)]

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._delay):
                await self._hurry.wait()
        except TimeoutError:
            return
