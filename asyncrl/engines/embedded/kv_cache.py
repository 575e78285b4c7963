"""The static KV cache: a row per slot, memory touched only where sequences have been.

Shapes: S slots, H key/value heads, C tokens of context, D head dimension, N sequences of a forward pass, Q new tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

LayerShape = tuple[int, int, int]
"""(key/value heads, key dimension, value dimension) of one layer."""


class SlotCache(Cache):
    """What the model sees as its cache. A forward pass is announced with `target`: then every layer's `update` writes the new
    keys and values to their slots and returns the slots' rows up to the announced length.

    Layers of one shape lie in one tensor [L, S, H, C, D], so that copying slots is one operation.
    """

    def __init__(self, layers: Sequence[LayerShape], *, max_slots: int, context: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers=[])
        sizes = [(heads, dim) for heads, key_dim, value_dim in layers for dim in (key_dim, value_dim)]
        self._storage = {
            size: _zeros((sizes.count(size), max_slots, size[0], context, size[1]), dtype, device)
            for size in dict.fromkeys(sizes)
        }
        taken = dict.fromkeys(sizes, 0)
        planes = []
        for size in sizes:
            planes.append(self._storage[size][taken[size]])
            taken[size] += 1
        self._keys, self._values = planes[0::2], planes[1::2]
        self._flat = [plane.view(-1, plane.shape[-1]) for plane in planes]
        self._context = context
        self._all_rows = torch.arange(max_slots, device=device)
        self._rows = self._all_rows[:0]
        self._count = 0
        self._places: dict[int, torch.Tensor] = {}
        self._columns = self._all_rows[:0]
        self._chunk: slice | None = None
        self._length = 0

    def target_decode(self, columns_N: torch.Tensor, length: int) -> None:
        """The next pass writes one token of slot i at columns[i] (int64[N]) and reads slots 0 … N−1 up to `length` tokens."""
        self._count = columns_N.shape[0]
        self._rows, self._columns = self._all_rows[: self._count], columns_N
        self._chunk, self._length = None, length
        self._places = {}

    def target_prefill(self, rows_N: torch.Tensor, start: int, end: int) -> None:
        """The next pass writes tokens start … end−1 of the slots `rows` (int64[N]) and reads those slots from 0 to `end`."""
        self._rows, self._chunk, self._length = rows_N, slice(start, end), end

    def target_rows(self, slots_R: torch.Tensor, columns_R: torch.Tensor) -> None:
        """The next pass writes one token at columns[r] of slots[r] (int64[R], no pair twice) in every layer's `write_rows`."""
        self._rows, self._columns = slots_R, columns_R
        self._places = {}

    def write_rows(self, keys_RHD: torch.Tensor, values_RHD: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a token's keys and values per row; the layer's planes [S, H, C, D] of all slots come back."""
        places = self._decode_places(keys_RHD.shape[1])
        self._flat[2 * layer].index_copy_(0, places, keys_RHD.reshape(-1, keys_RHD.shape[2]))
        self._flat[2 * layer + 1].index_copy_(0, places, values_RHD.reshape(-1, values_RHD.shape[2]))
        return self._keys[layer], self._values[layer]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, H, Q, D] in; [N, H, length, D] out (while decoding, views of the cache)."""
        keys, values, rows, length = self._keys[layer_idx], self._values[layer_idx], self._rows, self._length
        if self._chunk is None:
            places, count = self._decode_places(keys.shape[1]), self._count
            self._flat[2 * layer_idx].index_copy_(0, places, key_states.reshape(-1, key_states.shape[3]))
            self._flat[2 * layer_idx + 1].index_copy_(0, places, value_states.reshape(-1, value_states.shape[3]))
            return keys[:count, :, :length], values[:count, :, :length]
        keys[:, :, self._chunk].index_copy_(0, rows, key_states)
        values[:, :, self._chunk].index_copy_(0, rows, value_states)
        if self._chunk.start == 0:
            return key_states, value_states
        return keys[:, :, :length].index_select(0, rows), values[:, :, :length].index_select(0, rows)

    def _decode_places(self, heads: int) -> torch.Tensor:
        """int64[N·H]: where each slot's new token lies in a plane seen as rows of D numbers; the same for every layer."""
        places = self._places.get(heads)
        if places is None:
            head_rows = self._rows[:, None] * heads + torch.arange(heads, device=self._rows.device)
            places = self._places[heads] = (head_rows * self._context + self._columns[:, None]).view(-1)
        return places

    def copy(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """The first `length` tokens of each source slot to its target slot; no slot is both."""
        if length:
            for storage in self._storage.values():
                storage[:, target, :, :length] = storage[:, source, :, :length]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero these slots, so that a number that is not finite cannot leak through a masked position."""
        for storage in self._storage.values():
            storage[:, slots] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length, 0

    @property
    def num_bytes(self) -> int:
        return sum(storage.numel() * storage.element_size() for storage in self._storage.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU without touching the memory, so that an unused context costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    carrier = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, carrier)).view(dtype)
