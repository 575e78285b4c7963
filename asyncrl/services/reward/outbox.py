"""What waits to be sent: filled from callbacks, emptied by one loop."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Unbounded, in order. After `end` the loop is told when nothing is left."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, item: Item) -> None:
        assert not self._ended, "put after end"
        self._items.append(item)
        self._changed.set()

    def end(self) -> None:
        """Nothing more will be put. Ending twice is harmless."""
        self._ended = True
        self._changed.set()

    async def filled(self) -> bool:
        """Wait until something is here; False when nothing is and nothing will be."""
        while not self._items and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        return bool(self._items)

    def take(self) -> list[Item]:
        """Everything that is here."""
        items, self._items = self._items, []
        return items
