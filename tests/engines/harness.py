"""The engine loop without HTTP, and transformers' own answer to compare with."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from asyncrl.engines.embedded.loading import load_model
from asyncrl.engines.embedded.loop import EngineLoop
from asyncrl.engines.embedded.runner import ModelRunner
from asyncrl.engines.embedded.sequences import Sampling, Sequence, Update

WAIT_SECONDS = 30.0
_rids = itertools.count()


def sequence(prompt: Many[int], *, rid: str | None = None, **sampling: Any) -> Sequence:
    sampling.setdefault("max_new_tokens", 16)
    return Sequence(rid=rid or f"r{next(_rids)}", prompt=np.asarray(prompt, np.int32), sampling=Sampling(**sampling))


class Harness:
    """An engine that remembers the last update of every request; waits are on a condition, with a deadline."""

    def __init__(self, model: Any, *, max_slots: int = 8, context: int = 96):
        self._changed = threading.Condition()
        self.updates: dict[str, list[Update]] = {}
        self._marks: deque[tuple[str, int]] = deque()
        self._go_on = threading.Semaphore(0)
        self.loop = EngineLoop(ModelRunner(model, max_slots=max_slots, context=context), self._listen)
        self.loop.start()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.close()

    def _listen(self, updates: Many[Update]) -> None:
        with self._changed:
            for update in updates:
                self.updates.setdefault(update.sequence.rid, []).append(update)
            self._changed.notify_all()
        if self._marks and self.progress(self._marks[0][0]) >= self._marks[0][1]:
            assert self._go_on.acquire(timeout=WAIT_SECONDS)

    def at(self, one: Sequence, marks: Many[int]) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        """Submit a streaming sequence; yield each time it has reached a mark, the loop held there. What is yielded makes a call
        that posts something to the loop, and lets the loop go once it is posted."""
        self._marks.extend((one.rid, mark) for mark in marks)
        self.submit(one)
        for mark in marks:
            self.wait(lambda mark=mark: self.progress(one.rid) >= mark)
            yield self._post_and_let_go

    def _post_and_let_go(self, call: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(call)
            deadline = time.monotonic() + WAIT_SECONDS
            while not self.loop._inbox and not answer.done() and time.monotonic() < deadline:
                time.sleep(0.0005)
            self._marks.popleft()
            self._go_on.release()
            return answer.result(WAIT_SECONDS)

    def wait(self, condition: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition() or self.loop.failure is not None, WAIT_SECONDS)
        assert self.loop.failure is None, self.loop.failure

    def finished(self, rid: str) -> Update | None:
        last = self.updates.get(rid, [None])[-1]
        return last if last is not None and last.finish is not None else None

    def progress(self, rid: str) -> int:
        """Tokens of a streaming request so far."""
        return len(self.updates[rid][-1].token_ids) if rid in self.updates else 0

    def submit(self, *sequences: Sequence) -> None:
        self.loop.submit(sequences)

    def run(self, *sequences: Sequence) -> list[Update]:
        """Submit these and wait for them all."""
        self.submit(*sequences)
        return self.results(*sequences)

    def results(self, *sequences: Sequence) -> list[Update]:
        self.wait(lambda: all(self.finished(one.rid) for one in sequences))
        return [update for one in sequences if (update := self.finished(one.rid)) is not None]


def load(folder: Any, dtype: str = "float32") -> Any:
    return load_model(folder, dtype=dtype)


@torch.no_grad()
def reference_log_probs(model: Any, prompt: Many[int], output: Many[int], temperature: float = 1.0) -> np.ndarray:
    """float32[R]: transformers' log-probs of the output tokens, one plain forward pass, no cache."""
    ids = torch.tensor([[*prompt, *output]], dtype=torch.long)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    picked = torch.tensor(list(output), dtype=torch.long)
    return logits.log_softmax(-1).gather(1, picked[:, None])[:, 0].numpy()


@torch.no_grad()
def reference_greedy(model: Any, prompt: Many[int], count: int) -> list[int]:
    """Greedy continuation by plain forward passes."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def random_prompts(count: int, *, shortest: int = 1, longest: int = 40, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(2, 64, random.integers(shortest, longest + 1)).tolist() for _ in range(count)]
