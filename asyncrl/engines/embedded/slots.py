"""The slot table: one row per running sequence, rows 0 … n−1 always in use, everything a decode step needs as arrays.

A step then costs a handful of array operations whatever the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.engines.embedded.sequences import Sequence

NO_STOP = -1


@dataclass(frozen=True)
class Moves:
    """Rows to copy, source[i] to target[i]; no row is both. `length`: the longest KV among the sources."""

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    length: int


class SlotTable:
    """Arrays over S slots and a context of C tokens.

    tokens int32[S, C]: prompt and output; kv_length int64[S]: tokens whose keys and values are in the cache, always one less
    than the tokens there are, so that tokens[s, kv_length[s]] is what the next step feeds; generated int64[S]; told int64[S]:
    those of them that incremental updates have told already.
    """

    def __init__(self, max_slots: int, context: int):
        self.context = context
        self.tokens = np.zeros((max_slots, context), np.int32)
        self.log_probs = np.zeros((max_slots, context), np.float32)
        self.kv_length = np.zeros(max_slots, np.int64)
        self.prompt_length = np.zeros(max_slots, np.int64)
        self.generated = np.zeros(max_slots, np.int64)
        self.max_new = np.zeros(max_slots, np.int64)
        self.told = np.zeros(max_slots, np.int64)
        self.seeds = np.zeros(max_slots, np.uint64)
        self.seed_offset = np.zeros(max_slots, np.int64)
        self.temperature = np.ones(max_slots, np.float32)
        self.top_p = np.ones(max_slots, np.float32)
        self.top_k = np.full(max_slots, -1, np.int64)
        self.stream_interval = np.full(max_slots, context + 1, np.int64)
        self.stop_ids = np.full((max_slots, 4), NO_STOP, np.int32)
        self._rows = np.arange(max_slots)

    def fill(self, slot: int, sequence: Sequence) -> None:
        """Put a sequence that has generated nothing into `slot`."""
        sampling, length = sequence.sampling, len(sequence.prompt)
        self.tokens[slot, :length] = sequence.prompt
        self.prompt_length[slot] = length
        self.kv_length[slot] = length - 1
        self.generated[slot] = 0
        self.max_new[slot] = min(sampling.max_new_tokens, self.context - length)
        self.told[slot] = 0
        self.seeds[slot], self.seed_offset[slot] = sampling.seed, sampling.seed_offset
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.stream_interval[slot] = sampling.stream_interval or self.context + 1
        self._fill_stops(slot, sampling.stop_token_ids)

    def _fill_stops(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_STOP)
        self.stop_ids[slot] = NO_STOP
        self.stop_ids[slot, : len(stop_ids)] = stop_ids

    def append(self, tokens: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """One new token for each of the first len(tokens) slots; True where it was the sequence's last."""
        n = len(tokens)
        rows = self._rows[:n]
        self.log_probs[rows, self.generated[:n]] = log_probs
        self.generated[:n] += 1
        self.kv_length[:n] += 1
        done: npt.NDArray[np.bool_] = self.generated[:n] >= self.max_new[:n]
        self.tokens[rows, self.kv_length[:n]] = tokens
        return done | (self.stop_ids[:n] == tokens[:, None]).any(axis=1)

    def output(self, slot: int, start: int = 0) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Copies of the tokens generated in `slot` and their log-probs, without the first `start`."""
        begin, count = self.prompt_length[slot], self.generated[slot]
        return self.tokens[slot, begin + start : begin + count].copy(), self.log_probs[slot, start:count].copy()

    def compact(self, running: int, gone: npt.NDArray[np.int64]) -> Moves:
        """Close the holes left by the rows `gone` of the first `running`: the last survivors move into them."""
        left = running - len(gone)
        target = np.sort(gone[gone < left])
        source = np.setdiff1d(self._rows[left:running], gone)
        for array in self._arrays():
            array[target] = array[source]
        return Moves(source, target, int(self.kv_length[target].max(initial=0)))

    def _arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        return tuple(value for name, value in vars(self).items() if isinstance(value, np.ndarray) and name != "_rows")
