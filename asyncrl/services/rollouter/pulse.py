"""A signal that several loops of one service wait for: something changed, look again."""

from __future__ import annotations

import asyncio


class Pulse:
    """`beat` wakes everybody who waits now. Who looks, finds nothing to do and then waits without an await between misses
    nothing."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._is_awaited = False

    def beat(self) -> None:
        if self._is_awaited:
            self._event.set()
            self._event, self._is_awaited = asyncio.Event(), False

    async def wait(self, timeout: float) -> None:
        """Until the next beat, or until `timeout` seconds have passed."""
        event, self._is_awaited = self._event, True
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            return
