"""Where figures go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """Takes metrics off the hot path: `log` returns at once and loses nothing; `close` flushes."""

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        """Flat names and values on an axis of the service's own ("trainer", "rollouter", "eval", …)."""

    async def close(self) -> None:
        """Deliver what is still held, by a deadline."""
