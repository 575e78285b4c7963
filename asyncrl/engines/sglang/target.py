"""A scheduler's parameters as a `WeightTarget`: found by Hugging Face names, swapped between two steps.

    receiver's worker    find ─▶ spare ─▶ (writes a version into the shadow, while the scheduler decodes) ─▶ commit, waits
    scheduler's thread   step ─▶ between_steps(): the swap, if one is asked for ─▶ step

| loop     | consumes         | waits for                      | is unblocked by                         |
|----------|------------------|--------------------------------|-----------------------------------------|
| commit   | –                | the scheduler's next iteration | `between_steps`, or its deadline        |
| (scheduler's own) | one swap | nothing: an idle one sleeps   | a request, or `wake` (the swap is there) |

A swap needs no call of SGLang's: the scheduler makes it itself, so that the pause is what the exchange of memory takes.
On a CPU that is two pointers a parameter. On a GPU captured graphs hold the addresses, so the values are copied, after the device
has finished what it was given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.engines.sglang.naming import Place, places
from asyncrl.engines.sglang.shadow import Shadow
from asyncrl.errors import DeadlineExceeded, SyncError
from asyncrl.protocols.weights import CommitReport, KvPolicy, PolicyVersion

COMMIT_SECONDS = 60.0
Recompute = Callable[[Callable[[], None]], None]
"""Retract what runs, do this, and let it be prefilled again."""


@dataclass
class _Swap:
    version: PolicyVersion
    kv_policy: KvPolicy
    answer: Future[CommitReport]


class SchedulerTarget:
    """`protocols.WeightTarget` in a scheduler process.

    model: the scheduler's; announce: tells the scheduler its weights' new version; recompute: how it swaps under that policy;
    wake: ends an idle scheduler's sleep. `commit` is called by one thread at a time, `between_steps` by the scheduler's own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        announce: Callable[[str], None],
        recompute: Recompute,
        wake: Callable[[], None],
        commit_seconds: float = COMMIT_SECONDS,
    ):
        self._model, self._announce, self._recompute, self._wake = model, announce, recompute, wake
        self._commit_seconds = commit_seconds
        self._shadow: Shadow | None = None
        self._places: dict[str, Place] = {}
        self._live: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}
        self._asked: _Swap | None = None
        self._lock = threading.Lock()

    def find(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """The loader is asked once for each set of names."""
        if wanted.keys() == self._places.keys():
            return
        shadow = self._shadow or Shadow(self._model)
        load: Any = shadow.model.load_weights
        found = places(load, [spare for _, spare in shadow.pairs], wanted, shadow.pairs[0][0].dtype)
        self._shadow, self._places = shadow, found
        self._live = {name: place.view(shadow.pairs[place.parameter][0].data) for name, place in found.items()}
        self._spare = {name: place.view(shadow.pairs[place.parameter][1].data) for name, place in found.items()}

    def spare(self) -> Mapping[str, torch.Tensor]:
        return self._spare

    def live(self) -> Mapping[str, torch.Tensor]:
        return self._live

    def commit(self, staged: Mapping[str, torch.Tensor], version: PolicyVersion, kv_policy: KvPolicy) -> CommitReport:
        """Have the scheduler swap. Raises DeadlineExceeded, with nothing changed, if it does not come to it."""
        if staged is not self._spare and any(staged[name] is not spare for name, spare in self._spare.items()):
            raise SyncError("a version is put together in this target's spare tensors")
        swap = _Swap(version, kv_policy, Future())
        with self._lock:
            self._asked = swap
        self._wake()
        try:
            return swap.answer.result(self._commit_seconds)
        except TimeoutError:
            with self._lock:
                if self._asked is swap:
                    self._asked = None
                    raise DeadlineExceeded(
                        f"the scheduler did not take version {version} in {self._commit_seconds:g} s (sync.timeout_seconds)"
                    ) from None
            return swap.answer.result(self._commit_seconds)  # it has begun: what it comes to is the answer

    def between_steps(self) -> None:
        """Called by the scheduler in each of its iterations, where no request is half-way through a step."""
        with self._lock:
            swap, self._asked = self._asked, None
        if swap is not None:
            try:
                swap.answer.set_result(self._make(swap))
            except BaseException as error:  # boundary: an exception in a scheduler kills the server; the receiver tells this one
                swap.answer.set_exception(error)

    def _make(self, swap: _Swap) -> CommitReport:
        began = time.perf_counter()

        def exchange() -> None:
            self._exchange()
            self._announce(str(swap.version))

        if swap.kv_policy == "recompute":
            self._recompute(exchange)
        else:
            exchange()
        return CommitReport(pause_seconds=time.perf_counter() - began)

    def _exchange(self) -> None:
        assert self._shadow is not None, "a version was put together"
        if any(live.is_cuda for live, _ in self._shadow.pairs):
            _copy_on_device(self._shadow.pairs)
            return
        for live, spare in self._shadow.pairs:
            live.data, spare.data = spare.data, live.data
        for name, live in self._live.items():
            spare = self._spare[name]
            live.data, spare.data = spare.data, live.data


@torch.no_grad()
def _copy_on_device(pairs: list[tuple[Any, Any]]) -> None:
    """Behind all that the device was given, and before all that it is given next. Runs on machines with CUDA only."""
    torch.cuda.synchronize()
    torch._foreach_copy_([live.data for live, _ in pairs], [spare.data for _, spare in pairs])
    torch.cuda.synchronize()
