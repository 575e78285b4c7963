"""Which row of the data stands at each position of an epoch: a pure function of (seed, epoch, num_rows, shuffle).

The prompt sources draw rows in this order and the audit derives from it what was dispatched, so both must agree on every
machine: integer arithmetic only, no generator state, no table of rows. A shuffled order is a keyed permutation of
range(num_rows): an alternating Feistel network on the smallest power of two that holds it, walked until the value falls
inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). One lookup costs microseconds, for any num_rows.
"""

from __future__ import annotations

from collections.abc import Iterator

_MASK_64 = (1 << 64) - 1
_ROUNDS = 10


class PromptOrder:
    """The order of one epoch: `order[position]` is a row; every row of range(num_rows) stands at exactly one position.

    An endless source (num_rows None) yields its rows 0, 1, 2, … as they come, whatever `shuffle` says.
    """

    def __init__(self, seed: int, epoch: int, num_rows: int | None, shuffle: bool):
        if num_rows is not None and num_rows < 0:
            raise ValueError(f"num_rows is {num_rows}: a source has 0 rows or more, or None when it is endless")
        self.num_rows = num_rows
        self._shuffled = shuffle and num_rows is not None and num_rows > 1
        bits = max(1, (num_rows - 1).bit_length()) if self._shuffled and num_rows is not None else 1
        self._right_bits = (bits + 1) // 2
        self._left_mask = (1 << (bits // 2)) - 1
        self._right_mask = (1 << self._right_bits) - 1
        key = _mix(_mix(seed & _MASK_64) ^ (epoch & _MASK_64))
        keys = [_mix((key + round_number) & _MASK_64) for round_number in range(_ROUNDS)]
        self._keys = tuple(zip(keys[::2], keys[1::2], strict=True))

    def __getitem__(self, position: int) -> int:
        """The row at this position. Raises IndexError outside the epoch."""
        if position < 0 or (self.num_rows is not None and position >= self.num_rows):
            raise IndexError(f"position {position} is outside an epoch of {self.num_rows} rows")
        if not self._shuffled:
            return position
        assert self.num_rows is not None
        row = self._permute(position)
        while row >= self.num_rows:
            row = self._permute(row)
        return row

    def __iter__(self) -> Iterator[int]:
        position = 0
        while self.num_rows is None or position < self.num_rows:
            yield self[position]
            position += 1

    def _permute(self, value: int) -> int:
        left, right = value >> self._right_bits, value & self._right_mask
        left_mask, right_mask = self._left_mask, self._right_mask
        for even, odd in self._keys:
            right ^= _mix(left ^ even) & right_mask
            left ^= _mix(right ^ odd) & left_mask
        return left << self._right_bits | right


def prompt_order(seed: int, epoch: int, num_rows: int | None, shuffle: bool) -> PromptOrder:
    """The order of `epoch`: index it by position, or iterate over it."""
    return PromptOrder(seed, epoch, num_rows, shuffle)


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): a bijection of 64-bit integers whose output bits look independent."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
