"""A signal that several loops of one service wait for: something changed, look again."""

from __future__ import annotations

import asyncio


class Pulse:
    """`beat` wakes everybody who waits now. Who looks, finds nothing to do and then waits without an await between misses
    nothing."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Until the next beat, or until `timeout` seconds have passed."""
        event = self._event
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            return
