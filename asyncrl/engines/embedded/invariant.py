"""Batch-invariant computing: a token's numbers, bit for bit, depend on the tokens before it and on nothing else.

A matrix product's rounding depends on how many rows it has, attention's on how many keys it reads, masked ones included.
So here a pass is a list of rows (a token, its position, its slot), and every row meets the same shapes whatever its company:

| part                  | shape that a row meets                                                                          |
|-----------------------|-------------------------------------------------------------------------------------------------|
| linear layers, head   | blocks of a fixed number of rows, the last one padded; a row's place in a block does not matter |
| attention             | one query row over as many keys as its own position needs, rounded up to KV_BLOCK               |
| element-wise, norms   | row by row; the padding keeps vector loops free of remainders                                   |

Prefill, decoding and prefilling anew after a change of weights are the same pass, so a prefix has the same keys and values
whether its tokens were sampled here, came in a prompt, or were copied from a sibling.

Shapes: R rows of a pass, E hidden size, D head size, G query heads of one key/value head, C context, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from asyncrl.engines.embedded.kv_cache import SlotCache
from asyncrl.engines.embedded.lean import LeanForward

BLOCK_ROWS = 128
SMALLER_BLOCKS = (16, 32, 48, 64, 96)
KV_BLOCK = 256
CPU_PASS_ROWS = 512

Linear = tuple[torch.Tensor, torch.Tensor | None]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Rows begin … end−1 of a pass that read their keys in one operation: those of `slot` (`is_one_slot`), or one row each of
    slot, slot + 1, … They read `length` keys; `mask` is additive, [rows, 1, 1, length]."""

    begin: int
    end: int
    slot: int
    is_one_slot: bool
    length: int
    mask: torch.Tensor


class InvariantForward(LeanForward):
    """Made by `of`. `block_sizes`: rows of a block that give the same bits as BLOCK_ROWS, ascending, that one last."""

    def __init__(self, model: Any, context: int):
        super().__init__(model, context)
        self._device = self._embedding.device
        self._columns = torch.arange(kv_columns(context), device=self._device)
        linears = [
            pair for layer in self._layers for pair in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
        ]
        self.block_sizes = agreeing_sizes([*linears, self._head])
        self.pass_rows = CPU_PASS_ROWS if self._device.type == "cpu" else BLOCK_ROWS

    def prefill(self, slots: Sequence[int], tokens: Sequence[npt.NDArray[np.int32]], cache: SlotCache) -> None:
        """Compute and store the keys and values of tokens[i] in slots[i], from position 0."""
        lengths = [len(row) for row in tokens]
        if not sum(lengths):
            return
        tokens_R = np.concatenate([np.asarray(row, np.int64) for row in tokens])
        slots_R = np.repeat(np.asarray(slots, np.int64), lengths)
        positions_R = np.concatenate([np.arange(length) for length in lengths])
        for part in self._passes(len(tokens_R)):
            self._layers_of(tokens_R[part], slots_R[part], positions_R[part], cache, is_decode=False)

    def decode(self, tokens: npt.NDArray[np.int32], positions: Rows, cache: SlotCache) -> Iterator[tuple[slice, torch.Tensor]]:
        """Feed tokens[i] at positions[i] of slot i. Yields the rows of each pass, and their logits float32[R, V], R rounded up to
        whole blocks: what lies past the pass's rows means nothing."""
        for part in self._passes(len(tokens)):
            slots = np.arange(part.start, part.stop)
            hidden = self._layers_of(tokens[part].astype(np.int64), slots, positions[part], cache, is_decode=True)
            yield part, self._linear(self._rms(hidden, self._norm), self._head).float()

    def _passes(self, rows: int) -> Iterator[slice]:
        for begin in range(0, rows, self.pass_rows):
            yield slice(begin, min(begin + self.pass_rows, rows))

    def _layers_of(self, tokens: Rows, slots: Rows, positions: Rows, cache: SlotCache, *, is_decode: bool) -> torch.Tensor:
        """[R padded, E], the last layer's output."""
        n, padded = len(tokens), sum(blocks_of(len(tokens), self.block_sizes))
        runs = [self._run(positions, *bounds, is_one_slot=not is_decode) for bounds in run_bounds(slots, positions, is_decode)]
        cache.target_rows(self._to_device(slots), self._to_device(positions))
        hidden = functional.embedding(self._to_device(_padded(tokens, padded)), self._embedding)
        positions_R = self._to_device(_padded(positions, padded))
        rotary = self._cos[positions_R], self._sin[positions_R]
        for number, layer in enumerate(self._layers):
            normed = self._rms(hidden, layer.input_norm)
            hidden = hidden + self._attend(layer, number, normed, n, rotary, runs, cache)
            normed = self._rms(hidden, layer.post_norm)
            gated = self._activation(self._linear(normed, layer.gate)).mul_(self._linear(normed, layer.up))
            hidden = hidden + self._linear(gated, layer.down)
        return hidden

    def _attend(
        self,
        layer: Any,
        number: int,
        hidden: torch.Tensor,
        n: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        runs: Sequence[Run],
        cache: SlotCache,
    ) -> torch.Tensor:
        """[R, E] in and out; the first n rows read and write the cache, the others are padding."""
        rows, dim = len(hidden), self._head_dim
        queries = self._linear(hidden, layer.q).view(rows, -1, dim)
        keys = self._linear(hidden, layer.k).view(rows, -1, dim)
        values = self._linear(hidden, layer.v).view(rows, -1, dim)
        if layer.q_norm is not None:
            queries, keys = self._rms(queries, layer.q_norm), self._rms(keys, layer.k_norm)
        both = torch.cat((queries, keys), dim=1)
        both = torch.addcmul(both * rotary[0], both.roll(dim // 2, dims=-1), rotary[1])
        num_queries = queries.shape[1]
        all_keys, all_values = cache.write_rows(both[:n, num_queries:], values[:n], number)
        queries = both[:, :num_queries].reshape(rows, -1, self._query_groups, dim)
        parts = [self._attend_run(run, queries, all_keys, all_values) for run in runs]
        if rows > n:
            parts.append(queries[n:])
        return self._linear((torch.cat(parts) if len(parts) > 1 else parts[0]).view(rows, -1), layer.o)

    def _attend_run(self, run: Run, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        count = run.end - run.begin
        slots = slice(run.slot, run.slot + (1 if run.is_one_slot else count))
        keys, values = keys[slots, :, : run.length], values[slots, :, : run.length]
        if run.is_one_slot:
            keys, values = keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1)
        return functional.scaled_dot_product_attention(
            queries[run.begin : run.end], keys, values, attn_mask=run.mask, scale=self._scaling
        )

    def _run(self, positions: Rows, begin: int, end: int, slot: int, *, is_one_slot: bool) -> Run:
        length = min(-(-(int(positions[begin]) + 1) // KV_BLOCK) * KV_BLOCK, len(self._columns))
        visible = self._columns[:length] <= self._to_device(positions[begin:end])[:, None]
        mask = torch.zeros(visible.shape, dtype=self._embedding.dtype, device=self._device)
        return Run(begin, end, slot, is_one_slot, length, mask.masked_fill_(~visible, float("-inf"))[:, None, None])

    def _linear(self, inputs: torch.Tensor, linear: Linear) -> torch.Tensor:
        """The rows in blocks of `block_sizes`."""
        sizes = blocks_of(inputs.shape[0], self.block_sizes)
        if len(sizes) == 1:
            return functional.linear(inputs, *linear)
        return torch.cat([functional.linear(block, *linear) for block in inputs.split(sizes)])

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def kv_columns(context: int) -> int:
    """Columns of a cache row: the context, rounded up so that every row of the cache begins on a vector's boundary."""
    return -(-context // 16) * 16


@lru_cache(maxsize=1024)
def blocks_of(rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks that cover so many rows: as many of the largest as fit, and for the rest the smallest that has room."""
    full, rest = divmod(rows, sizes[-1])
    return (sizes[-1],) * full + ((next(size for size in sizes if size >= rest),) if rest else ())


def run_bounds(slots: Rows, positions: Rows, is_decode: bool) -> list[tuple[int, int, int]]:
    """(begin, end, first slot) of the rows that can read together: as many keys as each other, and of one slot, or, while
    decoding (slots ascend by one), of several."""
    cuts = np.diff(positions // KV_BLOCK) != 0
    if not is_decode:
        cuts |= np.diff(slots) != 0
    begins = [0, *(np.flatnonzero(cuts) + 1).tolist()]
    return [(begin, end, int(slots[begin])) for begin, end in zip(begins, [*begins[1:], len(slots)], strict=True)]


def agreeing_sizes(linears: Iterable[Linear]) -> tuple[int, ...]:
    """BLOCK_ROWS, and on a CPU the smaller blocks in which each of these layers gives the same bits.

    A library picks its kernel by the shape alone; numbers of very different magnitude show a different order of summation at
    once. Other devices take whole blocks only, which cost them little.
    """
    shapes = {(tuple(weight.shape), weight.dtype, bias is not None): weight for weight, bias in linears}
    sizes = list(SMALLER_BLOCKS)
    for (shape, dtype, has_bias), weight in shapes.items():
        if weight.device.type != "cpu":
            return (BLOCK_ROWS,)
        sizes = _agreeing(shape, dtype, has_bias, sizes)
    return (*sizes, BLOCK_ROWS)


@torch.inference_mode()
def _agreeing(shape: tuple[int, ...], dtype: torch.dtype, has_bias: bool, sizes: Sequence[int]) -> list[int]:
    if not sizes:
        return []
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BLOCK_ROWS, shape[1], generator=generator)
    inputs = (inputs * torch.exp2(torch.randint(-8, 8, inputs.shape, generator=generator))).to(dtype)
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if has_bias else None
    whole = functional.linear(inputs, weight, bias)
    return [size for size in sizes if torch.equal(functional.linear(inputs[-size:], weight, bias), whole[-size:])]


def _padded(values: Rows, length: int) -> Rows:
    return np.pad(values, (0, length - len(values)))
