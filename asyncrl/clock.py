"""Time, as services see it: one protocol, the real clock, and room for a virtual one (`asyncrl.simulation`).

Services are coroutines. They wait with `asyncio` (sleep, timeout, events) and read the time here; the simulator runs them on
an event loop whose time is virtual, so a wait is never a wall-clock wait unless the loop is a real one.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: `now` for durations, `wall` for timestamps."""

    def now(self) -> float:
        """Seconds on a monotonic axis of no particular origin."""

    def wall(self) -> float:
        """Seconds since the Unix epoch."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class IdleMeter:
    """Seconds a service spent waiting, by the name of what it waited for.

    Waits of one meter do not nest, so the sum over reasons never passes the time since `start`.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._start = clock.now()
        self.seconds: dict[str, float] = {}

    def restart(self) -> None:
        """Begin counting anew, for instance when the first batch is there."""
        self._start = self._clock.now()
        self.seconds = {}

    def waiting(self, reason: str) -> _Wait:
        """Context manager: the time inside counts as waiting for `reason`."""
        return _Wait(self, reason)

    def add(self, reason: str, seconds: float) -> None:
        self.seconds[reason] = self.seconds.get(reason, 0.0) + seconds

    def share(self) -> float:
        """Waiting as a share of the time since the start, in [0, 1]."""
        elapsed = self._clock.now() - self._start
        return min(1.0, sum(self.seconds.values()) / elapsed) if elapsed > 0 else 0.0

    def now(self) -> float:
        return self._clock.now()


class _Wait:
    def __init__(self, meter: IdleMeter, reason: str):
        self._meter, self._reason = meter, reason

    def __enter__(self) -> None:
        self._began = self._meter.now()

    def __exit__(self, *exc: object) -> None:
        self._meter.add(self._reason, self._meter.now() - self._began)
