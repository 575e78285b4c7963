"""How many responses one server is asked for at once: as many as it says it can serve. Pure.

limit ← limit · BACK_OFF       when it queues requests, or its KV memory is nearly full
limit ← limit + 1/limit  for each response that finished while the limit was reached: one more a round
lowest ≤ limit ≤ highest
"""

from __future__ import annotations

BACK_OFF = 0.8
FULL = 0.95  # of the KV memory; beyond, a server retracts requests and computes their prefixes again
QUEUED = 0.1  # of the requests that run


class ConcurrencyLimit:
    """One server's. It starts at `start`; `lowest` and `highest` bound it."""

    def __init__(self, *, start: int, lowest: int, highest: int):
        assert 1 <= lowest <= start <= highest
        self._limit, self._lowest, self._highest = float(start), lowest, highest

    @property
    def limit(self) -> int:
        return int(self._limit)

    def reported(self, *, running: int, waiting: int, kv_use: float) -> None:
        """The server says how it is doing."""
        if kv_use > FULL or waiting > QUEUED * max(running, 1):
            self._limit = max(float(self._lowest), self._limit * BACK_OFF)

    def finished(self, *, asked: int) -> None:
        """A response is there, of `asked` that the server had."""
        if asked >= self.limit:
            self._limit = min(float(self._highest), self._limit + 1 / self._limit)
