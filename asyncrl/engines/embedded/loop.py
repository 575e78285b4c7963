"""The engine's loop: one thread that decodes, and takes requests, aborts and new weights between two steps.

    submit / abort / commit / close ──▶ inbox ──▶ (between steps) ──▶ admit + prefill ──▶ decode ──▶ listener(updates)

| loop   | consumes             | waits for                         | is unblocked by                |
|--------|----------------------|-----------------------------------|--------------------------------|
| engine | inbox, waiting queue | a request, when nothing is running | submit, abort, commit, close  |
| commit | (caller's thread)    | the loop to reach its next gap    | the swap, or its deadline      |

A commit exchanges memory; moving bytes is the caller's affair, in the caller's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asyncrl.engines.embedded import sequences
from asyncrl.engines.embedded.sampling import uniforms
from asyncrl.engines.embedded.scheduler import Admission, Scheduler
from asyncrl.engines.embedded.sequences import Update
from asyncrl.engines.embedded.slots import Moves
from asyncrl.errors import DeadlineExceeded, GenerationFailed
from asyncrl.protocols import CommitReport, PolicyVersion
from asyncrl.protocols.weights import KvPolicy

if TYPE_CHECKING:
    import torch

    from asyncrl.engines.embedded.runner import ModelRunner

log = logging.getLogger(__name__)
MAX_PREFILL_TOKENS = 4096
COMMIT_SECONDS = 60.0
INITIAL_VERSION = "default"

Listener = Callable[[Sequence[Update]], None]


@dataclass
class EngineStats:
    """Counts since the start. decode_seconds: wall time of decode steps; forward_cpu_seconds: processor time of the
    loop's thread in the model (decode, prefill, sampling) and in copying keys and values from slot to slot (a prompt's to those
    that share it, a sequence's when it moves), which is what the engine cannot do without."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    shared_prefills: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    forward_cpu_seconds: float = 0.0
    finished: int = 0
    aborted: int = 0
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=1024))


class EngineLoop:
    """Owns scheduler and runner. `listener` is called in the loop's thread, once per step that has something to tell."""

    def __init__(
        self,
        runner: ModelRunner,
        listener: Listener,
        *,
        version: str = INITIAL_VERSION,
        commit_seconds: float = COMMIT_SECONDS,
    ):
        """commit_seconds: the deadline of a swap, from when it is asked for; and once it has begun, that long again."""
        self._runner, self._listener, self._commit_seconds = runner, listener, commit_seconds
        self._scheduler = Scheduler(max_slots=runner.max_slots, context=runner.context, version=version)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self.stats = EngineStats()
        self.failure: BaseException | None = None

    # ---- called from any thread

    def start(self) -> None:
        self._thread.start()

    @property
    def version(self) -> str:
        return self._scheduler.version

    @property
    def batch_invariant(self) -> bool:
        return self._runner.batch_invariant

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def load(self) -> tuple[int, int]:
        """(running, waiting) sequences."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def submit(self, batch: Sequence[sequences.Sequence]) -> None:
        """Queue sequences; each leaves through the listener exactly once with a finish."""
        self._post(lambda: self._scheduler.add(batch))

    def score(self, rows: Sequence[npt.NDArray[np.int32]], temperature: float) -> Future[list[npt.NDArray[np.float32]]]:
        """Log-probs of each row's tokens but the first, between two steps; cancelled in time, it costs nothing."""
        answer: Future[list[npt.NDArray[np.float32]]] = Future()

        def work() -> None:
            if answer.set_running_or_notify_cancel():
                began = time.thread_time()
                try:
                    answer.set_result(self._runner.score(rows, temperature))
                except BaseException as error:  # boundary: who asked is told; the loop lives on
                    answer.set_exception(error)
                self.stats.forward_cpu_seconds += time.thread_time() - began
                self.stats.prefilled_tokens += sum(map(len, rows))

        self._post(work)
        return answer

    def abort(self, rids: Collection[str] | None) -> None:
        """End the sequences with these request ids, or all (None)."""
        wanted = None if rids is None else set(rids)
        self._post(lambda: self._abort(lambda sequence: wanted is None or sequence.rid in wanted, "aborted by request"))

    def abandon(self, sink: object) -> None:
        """End the sequences that report to `sink`: nobody waits for them any more."""
        self._post(lambda: self._abort(lambda sequence: sequence.sink is sink, "the client is gone"))

    def find(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """They are kept by the trainer's names (WeightTarget)."""

    def spare(self) -> Mapping[str, torch.Tensor]:
        """New memory (WeightTarget)."""
        return {name: tensor.new_empty(tensor.shape) for name, tensor in self.live().items()}

    def live(self) -> Mapping[str, torch.Tensor]:
        """Parameters by name (WeightTarget)."""
        return self._runner.live()

    def commit(self, staged: Mapping[str, torch.Tensor], version: PolicyVersion, kv_policy: KvPolicy) -> CommitReport:
        """Exchange live and staged memory between two steps (WeightTarget). Blocking.

        Raises PlanMismatch, with nothing changed, if the tensors do not fit; DeadlineExceeded if the loop never got to it.
        """
        answer: Future[CommitReport] = Future()

        def swap() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._commit(staged, str(version), kv_policy))
                except BaseException as error:  # boundary: the caller's thread raises it; the loop lives on
                    answer.set_exception(error)

        self._post(swap)
        try:
            return answer.result(self._commit_seconds)
        except TimeoutError:
            if not answer.cancel():  # it has begun: what it comes to is the answer
                return answer.result(self._commit_seconds)
            raise DeadlineExceeded(f"the decode loop did not take version {version} in {self._commit_seconds:g} s") from None

    def close(self, timeout: float = 10.0) -> None:
        """Abort what runs and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self._closing or self.failure is not None:
                raise GenerationFailed(f"the engine has ended: {self.failure or 'it was closed'}")
            self._inbox.append(action)
            self._wake.notify()

    # ---- the loop's own thread

    def _run(self) -> None:
        try:
            while self._take_inbox():
                self._admit()
                if self._scheduler.running:
                    self._step()
        except BaseException as error:  # boundary: the thread's end; the service reads `failure` and dies by name
            log.exception("the engine loop ended")
            self.failure = error
        self._end()

    def _end(self) -> None:
        """Whoever posted something gets an answer, and nobody posts any more."""
        with self._wake:
            self._closing = True
            actions = list(self._inbox)
            self._inbox.clear()
        for action in actions:
            action()
        message = f"the engine ended: {self.failure}" if self.failure else "the engine was closed"
        updates, _ = self._scheduler.abort(lambda sequence: True, message, status=503)
        self._tell(updates)

    def _take_inbox(self) -> bool:
        """Wait while there is nothing to do; run what was posted; False when the engine is to close."""
        with self._wake:
            while not (self._inbox or self._closing or self._scheduler.busy):
                self._wake.wait()
            actions = list(self._inbox)
            self._inbox.clear()
            closing = self._closing
        for action in actions:
            action()
        return not closing

    def _admit(self) -> None:
        if not self._scheduler.waiting:
            return
        admissions = self._scheduler.admit(MAX_PREFILL_TOKENS)
        began = time.thread_time()
        fresh = [admission for admission in admissions if admission.donor is None]
        self._runner.prefill([admission.slots[0] for admission in fresh], [admission.prompt[:-1] for admission in fresh])
        for admission in admissions:
            self._share(admission)
        self.stats.forward_cpu_seconds += time.thread_time() - began
        self.stats.prefilled_tokens += sum(admission.prefix_tokens for admission in fresh)

    def _share(self, admission: Admission) -> None:
        source, targets = (
            (admission.slots[0], admission.slots[1:]) if admission.donor is None else (admission.donor, admission.slots)
        )
        if targets:
            self._runner.cache.copy([source] * len(targets), targets, admission.prefix_tokens)
            self.stats.shared_prefills += len(targets)

    def _step(self) -> None:
        began, cpu_began = time.perf_counter(), time.thread_time()
        n, table = len(self._scheduler.running), self._scheduler.table
        lengths = table.kv_length[:n]
        tokens, log_probs = self._runner.decode(
            table.tokens[np.arange(n), lengths],
            lengths.copy(),
            temperature=table.temperature[:n],
            uniform=uniforms(table.seeds[:n], table.generated[:n] + table.seed_offset[:n]),
            top_p=_unless_off(table.top_p[:n], table.top_p[:n] < 1),
            top_k=_unless_off(table.top_k[:n], table.top_k[:n] > 0),
        )
        self.stats.decode_seconds += time.perf_counter() - began
        self.stats.forward_cpu_seconds += time.thread_time() - cpu_began
        self.stats.decode_steps += 1
        self.stats.generated_tokens += n
        finite = np.isfinite(log_probs)
        if not finite.all():
            self._runner.cache.clear(np.flatnonzero(~finite).tolist())
        self._move_and_tell(*self._scheduler.record(tokens, log_probs))

    def _abort(self, wanted: Callable[[sequences.Sequence], bool], message: str) -> None:
        self._move_and_tell(*self._scheduler.abort(wanted, message))

    def _move_and_tell(self, updates: Sequence[Update], moves: Moves | None) -> None:
        if moves is not None and len(moves.source):
            began = time.thread_time()
            self._runner.cache.copy(moves.source.tolist(), moves.target.tolist(), moves.length)
            self.stats.forward_cpu_seconds += time.thread_time() - began
        self._tell(updates)

    def _tell(self, updates: Sequence[Update]) -> None:
        if updates:
            ends = [update.finish.kind for update in updates if update.finish is not None]
            self.stats.finished += len(ends)
            self.stats.aborted += ends.count("abort")
            self._listener(updates)

    def _commit(self, staged: Mapping[str, torch.Tensor], version: str, kv_policy: KvPolicy) -> CommitReport:
        began = time.perf_counter()
        self._runner.exchange(staged)
        swapped = time.perf_counter()
        recompute = kv_policy == "recompute"
        if recompute:
            self._recompute()
        self._scheduler.committed(version, recomputed=recompute)
        ended = time.perf_counter()
        self.stats.pauses.append(ended - began)
        return CommitReport(pause_seconds=ended - began, recompute_seconds=ended - swapped if recompute else 0.0)

    def _recompute(self) -> None:
        """Prefill every running sequence again, so that each later token is wholly of the new weights."""
        n, table = len(self._scheduler.running), self._scheduler.table
        self._runner.prefill(range(n), [table.tokens[slot, : table.kv_length[slot]] for slot in range(n)])


def _unless_off(values: npt.NDArray[Any], on: npt.NDArray[np.bool_]) -> npt.NDArray[Any] | None:
    return values if on.any() else None
