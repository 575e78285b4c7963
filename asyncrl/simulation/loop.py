"""An asyncio event loop whose time is virtual: when everything waits, time jumps to the next timer.

Code under it runs in real time zero: a wait of an hour costs as much as a wait of a millisecond, and the same program gives the
same order of events on every machine. Nothing in it may wait for the outside world (sockets, threads, processes).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

Result = TypeVar("Result")
WALL_EPOCH = 1_700_000_000.0  # what `wall` reads at time 0


class Stuck(AssertionError):
    """Every coroutine waits for another one: no timer is left that could wake any of them."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything is ready to run, and starts at 0."""

    def __init__(self) -> None:
        self._virtual_seconds = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._virtual_seconds

    def jump(self, seconds: float) -> None:
        self._virtual_seconds += seconds


class VirtualClock:
    """`Clock` of the running virtual loop, or of `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None):
        self._loop = loop or asyncio.get_running_loop()

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return WALL_EPOCH + self._loop.time()


def run_virtual(main: Coroutine[Any, Any, Result], *, limit_seconds: float | None = None) -> Result:
    """Run to completion in virtual time. Raises Stuck when everything waits forever, TimeoutError after `limit_seconds` of it."""
    loop = VirtualTimeLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_limited(main, limit_seconds))


async def _limited(main: Coroutine[Any, Any, Result], limit_seconds: float | None) -> Result:
    async with asyncio.timeout(limit_seconds):
        return await main


class _JumpingSelector(selectors.BaseSelector):
    """The loop asks its selector to sleep until the next timer; this one lets the time pass at once."""

    def __init__(self, loop: VirtualTimeLoop):
        self._loop = loop
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = self._real.select(0)
        if events:
            return events
        if timeout is None:
            raise Stuck("everything waits, and no timer is left")
        if timeout > 0:
            self._loop.jump(timeout)
        return events

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.get_key(fileobj)

    def close(self) -> None:
        self._real.close()
