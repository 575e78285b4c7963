"""Sets of group ids that grow with a run, in a few bits an id."""

from __future__ import annotations

from asyncrl.messages.types import GroupId

_ROWS = 4096  # of a block: sparse rows do not take the room of those between them


class IdSet:
    """A bit a row, in blocks of neighbouring rows, for each epoch and attempt."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int, int], bytearray] = {}

    def add(self, id: GroupId) -> None:
        epoch, row, attempt = id
        bits = self._blocks.setdefault((epoch, attempt, row // _ROWS), bytearray())
        place, bit = divmod(row % _ROWS, 8)
        if place >= len(bits):
            bits.extend(bytes(place + 1 - len(bits)))
        bits[place] |= 1 << bit

    def __contains__(self, id: GroupId) -> bool:
        epoch, row, attempt = id
        bits = self._blocks.get((epoch, attempt, row // _ROWS), b"")
        place, bit = divmod(row % _ROWS, 8)
        return place < len(bits) and bool(bits[place] >> bit & 1)

    def __bool__(self) -> bool:
        return bool(self._blocks)


class RecentIds:
    """The last `capacity` ids that were added, at least, and at most twice as many: to know one that comes again."""

    def __init__(self, capacity: int):
        self._capacity, self._number = capacity, 0
        self._newer, self._older = IdSet(), IdSet()

    def add(self, id: GroupId) -> None:
        if self._number == self._capacity:
            self._newer, self._older, self._number = IdSet(), self._newer, 0
        self._newer.add(id)
        self._number += 1

    def __contains__(self, id: GroupId) -> bool:
        return id in self._newer or id in self._older
