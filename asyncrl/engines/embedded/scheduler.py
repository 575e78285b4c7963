"""Continuous batching, decided in plain values: who runs, who shares a prefill, who is done, which slots move.

    add ──▶ waiting (first come, first served) ──admit──▶ running (slots 0 … n−1) ──record──▶ finished
                                                              └── abort, at any time ──▶ finished

Invariants: running sequences hold slots 0 … n−1; every sequence that was added leaves exactly once, with a finish; a prompt's
KV is lent to another sequence only while both start under the same weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.engines.embedded.sequences import Finish, Sequence, Update
from asyncrl.engines.embedded.slots import Moves, SlotTable


@dataclass(frozen=True)
class Admission:
    """One prompt that enters. `slots`: the sequences that share it; `donor`: a slot that holds its prefix already, else None and
    `slots[0]` is prefilled. `prefix_tokens`: what is prefilled or copied (the prompt without its last token)."""

    prompt: npt.NDArray[np.int32]
    slots: tuple[int, ...]
    donor: int | None

    @property
    def prefix_tokens(self) -> int:
        return len(self.prompt) - 1


class Scheduler:
    """State of all sequences of one engine. Not thread-safe: only the engine's loop touches it."""

    def __init__(self, *, max_slots: int, context: int, version: str):
        self.max_slots = max_slots
        self.table = SlotTable(max_slots, context)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.version = version
        self._weights = 0  # grows with every commit

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    def admit(self, max_prefill_tokens: int) -> list[Admission]:
        """Fill free slots from the queue, as far as about `max_prefill_tokens` of prefill go (one prompt always may)."""
        if not self.waiting or len(self.running) == self.max_slots:
            return []
        first, donors = len(self.running), self._donors()
        groups: dict[bytes, list[int]] = {}
        budget = max_prefill_tokens
        while self.waiting and len(self.running) < self.max_slots:
            sequence = self.waiting[0]
            key, is_lent = sequence.key, sequence.key in donors
            slots = groups.get(key)
            if slots is None:
                cost = 0 if is_lent else len(sequence.prompt)
                if cost > budget and budget < max_prefill_tokens:
                    break
                budget -= cost
                slots = groups[key] = []
            self.waiting.popleft()
            sequence.cached_tokens = len(sequence.prompt) - 1 if slots or is_lent else 0
            slots.append(len(self.running))
            self.running.append(sequence)
        self._start(first)
        return [Admission(self.running[slots[0]].prompt, tuple(slots), donors.get(key)) for key, slots in groups.items()]

    def _donors(self) -> dict[bytes, int]:
        """By prompt, the first slot whose prefix is of the present weights."""
        donors: dict[bytes, int] = {}
        for slot, sequence in enumerate(self.running):
            if sequence.prefix_version == self._weights:
                donors.setdefault(sequence.key, slot)
        return donors

    def _start(self, first: int) -> None:
        started, spans = self.running[first:], ((self.version, 0),)
        for sequence in started:
            sequence.spans, sequence.prefix_version = spans, self._weights
        self.table.fill(first, started)

    def record(self, tokens: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> tuple[list[Update], Moves | None]:
        """Take one token per running sequence; returns what there is to tell, and the slots to move (None: nobody is done)."""
        finite = np.isfinite(log_probs)
        told = np.flatnonzero(self.table.append(tokens, log_probs) | ~finite)
        if not len(told):
            return [], None
        facts = (values.tolist() for values in (told, tokens[told], finite[told], self.table.is_full(told)))
        finishes = [self._finish_of(*of_slot) for of_slot in zip(*facts, strict=True)]
        updates = self._updates(told, finishes)
        goes_on = np.asarray([finish is None for finish in finishes])
        if goes_on.any():
            self.table.tell_later(told[goes_on])
        gone = told[~goes_on]
        return updates, self._remove(gone) if len(gone) else None

    def _finish_of(self, slot: int, token: int, is_finite: bool, is_full: bool) -> Finish | None:
        if not is_finite:
            return Finish("abort", message="the model's logits are not finite")
        if token in self.running[slot].sampling.stop_token_ids:
            return Finish("stop", matched=token)
        return Finish("length") if is_full else None

    def _updates(self, slots: npt.NDArray[np.int64], finishes: Iterable[Finish | None]) -> list[Update]:
        """One per slot, of which there is one at least."""
        starts, outputs = self.table.told[slots].tolist(), self.table.outputs(slots)
        updates = []
        for slot, finish, start, output in zip(slots.tolist(), finishes, starts, outputs, strict=True):
            sequence = self.running[slot]
            if sequence.sampling.is_incremental:
                self.table.told[slot] = self.table.generated[slot]
            updates.append(Update(sequence, *output, sequence.spans, finish, start))
        return updates

    def _remove(self, gone: npt.NDArray[np.int64]) -> Moves:
        moves = self.table.compact(len(self.running), gone)
        for source, target in zip(moves.source.tolist(), moves.target.tolist(), strict=True):
            self.running[target] = self.running[source]
        del self.running[len(self.running) - len(gone) :]
        return moves

    def abort(
        self, wanted: Callable[[Sequence], bool], message: str, status: int | None = None
    ) -> tuple[list[Update], Moves | None]:
        """End every sequence that `wanted` names; each keeps the tokens it has."""
        finish = Finish("abort", message=message, status=status)
        empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
        updates = [Update(sequence, *empty, ((self.version, 0),), finish) for sequence in self.waiting if wanted(sequence)]
        if updates:
            self.waiting = deque(sequence for sequence in self.waiting if not wanted(sequence))
        gone = np.asarray([slot for slot, sequence in enumerate(self.running) if wanted(sequence)], np.int64)
        if not len(gone):
            return updates, None
        return updates + self._updates(gone, [finish] * len(gone)), self._remove(gone)

    def committed(self, version: str, *, recomputed: bool) -> None:
        """The weights changed: what comes from here on is of `version`; prefixes are too, if they were recomputed."""
        self.version = version
        self._weights += 1
        for sequence, start in zip(self.running, self.table.generated[: len(self.running)].tolist(), strict=True):
            computed = sequence.spans if sequence.spans[-1][1] < start else sequence.spans[:-1]  # the last may have no token
            sequence.spans = (*computed, (version, start))
            if recomputed:
                sequence.prefix_version = self._weights
