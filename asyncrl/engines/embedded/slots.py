"""The slot table: one row per running sequence, rows 0 … n−1 always in use, everything a decode step needs as arrays.

A step then costs a handful of array operations whatever the number of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.engines.embedded.sequences import Sequence

NO_STOP = -1
_NUMBERS = 10  # rows of SlotTable's matrix before the stop tokens


@dataclass(frozen=True)
class Moves:
    """Rows to copy, source[i] to target[i]; no row is both. `length`: the longest KV among the sources."""

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    length: int


class SlotTable:
    """Arrays over S slots and a context of C tokens.

    tokens int32[S, C]: prompt and output; log_probs float32[S, C]: of the output tokens, each in its token's column.
    kv_length int64[S]: tokens whose keys and values are in the cache, always one less than the tokens there are, so that
    tokens[s, kv_length[s]] is what the next step feeds; generated int64[S]; told int64[S]: those of them that incremental updates
    have told already; tell_at int64[S]: how many are told of next; stop_ids int64[K, S], NO_STOP where a sequence has fewer. What
    belongs to a slot lies in few arrays, so that few operations move it.
    """

    def __init__(self, max_slots: int, context: int):
        self.context = context
        self._texts = np.zeros((2, max_slots, context), np.int32)
        self.tokens, self.log_probs = self._texts[0], self._texts[1].view(np.float32)
        self._ratios = np.ones((2, max_slots), np.float32)
        self.temperature, self.top_p = self._ratios
        self._slots = np.arange(max_slots)
        self._name(np.zeros((_NUMBERS + 4, max_slots), np.int64))

    def _name(self, numbers: npt.NDArray[np.int64]) -> None:
        self._numbers, self._growing = numbers, numbers[:2]
        self.kv_length, self.generated, self.told, self.tell_at, self.prompt_length = numbers[:5]
        self.max_new, self.seed_offset, self.top_k, self.stream_interval = numbers[5:9]
        self.seeds = numbers[9].view(np.uint64)
        self.stop_ids = numbers[_NUMBERS:]

    def fill(self, first: int, sequences: Many[Sequence]) -> None:
        """Put sequences that have generated nothing into the slots from `first` on."""
        new = slice(first, first + len(sequences))
        for slot, sequence in enumerate(sequences, first):
            self.tokens[slot, : len(sequence.prompt)] = sequence.prompt
        given = [sequence.sampling for sequence in sequences]
        self.prompt_length[new] = [len(sequence.prompt) for sequence in sequences]
        self.kv_length[new] = self.prompt_length[new] - 1
        self.generated[new] = self.told[new] = 0
        self.max_new[new] = np.minimum([one.max_new_tokens for one in given], self.context - self.prompt_length[new])
        self.temperature[new] = [one.temperature for one in given]
        self.top_p[new] = [one.top_p for one in given]
        self.top_k[new] = [one.top_k for one in given]
        self.seeds[new] = np.asarray([one.seed for one in given], np.uint64)
        self.seed_offset[new] = [one.seed_offset for one in given]
        self.stream_interval[new] = [one.stream_interval or self.context for one in given]
        self._fill_stops(new, [one.stop_token_ids for one in given])
        self.tell_later(self._slots[new])

    def _fill_stops(self, new: slice, stop_ids: Many[tuple[int, ...]]) -> None:
        most = max(map(len, stop_ids))
        missing = most - len(self.stop_ids)
        if missing > 0:
            self._name(np.pad(self._numbers, ((0, missing), (0, 0)), constant_values=NO_STOP))
        self.stop_ids[:, new] = NO_STOP
        self.stop_ids[:most, new] = np.asarray([ids + (NO_STOP,) * (most - len(ids)) for ids in stop_ids], np.int64).T

    def append(self, tokens: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """One new token for each of the first len(tokens) slots; True where it was the sequence's last, or is to be told."""
        n = len(tokens)
        self._growing[:, :n] += 1
        slots, columns = self._slots[:n], self.kv_length[:n]
        self.tokens[slots, columns], self.log_probs[slots, columns] = tokens, log_probs
        is_stop: npt.NDArray[np.bool_] = (self.stop_ids[:, :n] == tokens).any(axis=0)
        return is_stop | (self.generated[:n] >= self.tell_at[:n])

    def is_full(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether no further token may come."""
        full: npt.NDArray[np.bool_] = self.generated[slots] >= self.max_new[slots]
        return full

    def tell_later(self, slots: npt.NDArray[np.int64]) -> None:
        """These go on: they are told of again one interval from here, or at their end."""
        self.tell_at[slots] = np.minimum(self.generated[slots] + self.stream_interval[slots], self.max_new[slots])

    def outputs(self, slots: npt.NDArray[np.int64]) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        """Copies of the tokens generated in each of `slots` (one at least) and of their log-probs, without those told already."""
        begins = (self.prompt_length[slots] + self.told[slots]).tolist()
        lasts = self.kv_length[slots].tolist()
        first, end = min(begins), max(lasts) + 1
        tokens, log_probs = self.tokens[slots, first:end], self.log_probs[slots, first:end]
        columns = [slice(begin - first, last + 1 - first) for begin, last in zip(begins, lasts, strict=True)]
        return [(tokens[row, part], log_probs[row, part]) for row, part in enumerate(columns)]

    def compact(self, running: int, gone: npt.NDArray[np.int64]) -> Moves:
        """Close the holes left by the rows `gone` (ascending) of the first `running`: the last survivors move into them."""
        left = running - len(gone)
        stays = np.ones(running, np.bool_)
        stays[gone] = False
        source = stays[left:].nonzero()[0] + left
        target = gone[: len(source)]
        if not len(source):
            return Moves(source, target, 0)
        length = int(self.kv_length[source].max())
        self._texts[:, target, : length + 1] = self._texts[:, source, : length + 1]
        self._numbers[:, target] = self._numbers.take(source, axis=1)
        self._ratios[:, target] = self._ratios.take(source, axis=1)
        return Moves(source, target, length)
