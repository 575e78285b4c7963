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
        groups: dict[bytes, list[int]] = {}
        donors: dict[bytes, int | None] = {}
        budget = max_prefill_tokens
        while self.waiting and len(self.running) < self.max_slots:
            sequence = self.waiting[0]
            if sequence.key not in groups:
                donor = self._donor(sequence.key)
                cost = 0 if donor is not None else len(sequence.prompt)
                if cost > budget and budget < max_prefill_tokens:
                    break
                budget -= cost
                groups[sequence.key], donors[sequence.key] = [], donor
            self.waiting.popleft()
            groups[sequence.key].append(
                self._start(sequence, shared=bool(groups[sequence.key]) or donors[sequence.key] is not None)
            )
        return [Admission(self.running[slots[0]].prompt, tuple(slots), donors[key]) for key, slots in groups.items()]

    def _donor(self, key: bytes) -> int | None:
        for slot, sequence in enumerate(self.running):
            if sequence.key == key and sequence.prefix_version == self._weights:
                return slot
        return None

    def _start(self, sequence: Sequence, *, shared: bool) -> int:
        slot = len(self.running)
        self.running.append(sequence)
        self.table.fill(slot, sequence)
        sequence.spans = [(self.version, 0)]
        sequence.prefix_version = self._weights
        sequence.cached_tokens = len(sequence.prompt) - 1 if shared else 0
        return slot

    def record(self, tokens: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> tuple[list[Update], Moves | None]:
        """Take one token per running sequence; returns what there is to tell, and the slots to move (None: nobody is done)."""
        finite = np.isfinite(log_probs)
        done = self.table.append(tokens, log_probs) | ~finite
        updates = self._stream_updates(done)
        if not done.any():
            return updates, None
        gone = np.flatnonzero(done)
        for slot in gone.tolist():
            updates.append(self._update(slot, self._finish_of(slot, int(tokens[slot]), bool(finite[slot]))))
        return updates, self._remove(gone)

    def _stream_updates(self, done: npt.NDArray[np.bool_]) -> list[Update]:
        n = len(done)
        due = (self.table.generated[:n] % self.table.stream_interval[:n] == 0) & ~done
        return [self._update(slot, None) for slot in np.flatnonzero(due).tolist()] if due.any() else []

    def _finish_of(self, slot: int, token: int, finite: bool) -> Finish:
        if not finite:
            return Finish("abort", message="the model's logits are not finite")
        if token in self.running[slot].sampling.stop_token_ids:
            return Finish("stop", matched=token)
        return Finish("length")

    def _update(self, slot: int, finish: Finish | None) -> Update:
        sequence, start = self.running[slot], 0
        if sequence.sampling.is_incremental:
            start = int(self.table.told[slot])
            self.table.told[slot] = self.table.generated[slot]
        return Update(sequence, *self.table.output(slot, start), tuple(sequence.spans), finish, start)

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
        updates += [self._update(slot, finish) for slot in gone.tolist()]
        return updates, self._remove(gone) if len(gone) else None

    def committed(self, version: str, *, recomputed: bool) -> None:
        """The weights changed: what comes from here on is of `version`; prefixes are too, if they were recomputed."""
        self.version = version
        self._weights += 1
        for slot, sequence in enumerate(self.running):
            start = int(self.table.generated[slot])
            if sequence.spans[-1][1] == start:  # nothing was computed under the version before
                sequence.spans.pop()
            sequence.spans.append((version, start))
            if recomputed:
                sequence.prefix_version = self._weights
