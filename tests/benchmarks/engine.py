"""The embedded engine against transformers' `generate`, on 64 requests of different lengths, one thread each.

The baseline is given every advantage it has: the fastest of several batch sizes and caches, requests sorted by length so that a
batch wastes little, no log-probs. Ours returns log-probs, samples every request from its own seed, and takes the requests as they
come. Both ignore the end token, so that both make exactly the same number of tokens.

The model is the built-in one's architecture (0.11 M parameters, float32), where the cost of Python and of padding shows most.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence as Many

import numpy as np
import torch

from asyncrl.engines.embedded.loading import load_model
from asyncrl.engines.embedded.loop import EngineLoop
from asyncrl.engines.embedded.runner import ModelRunner
from asyncrl.engines.embedded.sequences import Sampling, Sequence, Update
from tests.models import tiny_model

LIMIT = 1.5
REQUESTS = 64
CONTEXT = 256


def requests(seed: int = 0) -> list[tuple[list[int], int]]:
    """(prompt, new tokens): prompts of 8 to 64 tokens, responses of 16 to 128."""
    random = np.random.default_rng(seed)
    return [
        (random.integers(2, 64, int(random.integers(8, 65))).tolist(), int(random.integers(16, 129))) for _ in range(REQUESTS)
    ]


class Ours:
    """The engine loop, without HTTP, with a slot for every request."""

    def __init__(self, model, slots: int):
        self._done = threading.Semaphore(0)
        self._loop = EngineLoop(ModelRunner(model, max_slots=slots, context=CONTEXT), self._listen)
        self._loop.start()

    def _listen(self, updates: Many[Update]) -> None:
        for update in updates:
            assert update.finish is not None
            assert len(update.log_probs) == update.sequence.sampling.max_new_tokens
            self._done.release()

    def seconds(self, work: Many[tuple[list[int], int]]) -> float:
        sequences = [
            Sequence(str(index), np.asarray(prompt, np.int32), Sampling(max_new_tokens=count, seed=index))
            for index, (prompt, count) in enumerate(work)
        ]
        began = time.perf_counter()
        self._loop.submit(sequences)
        for _ in sequences:
            assert self._done.acquire(timeout=120)
        return time.perf_counter() - began

    def close(self) -> None:
        self._loop.close()


@torch.inference_mode()
def generate_seconds(model, work: Many[tuple[list[int], int]], batch: int, cache: str | None) -> float:
    """transformers' generate over sorted batches, left-padded; a batch runs to its longest response."""
    ordered = sorted(work, key=lambda request: (request[1], len(request[0])))
    began = time.perf_counter()
    for first in range(0, len(ordered), batch):
        part = ordered[first : first + batch]
        longest = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in part])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
        count = max(count for _, count in part)
        options = {} if cache is None else {"cache_implementation": cache}
        model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=count, min_new_tokens=count, **options)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    work = requests()
    tokens = sum(count for _, count in work)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(tiny_model(folder, hidden=64, layers=2, context=CONTEXT), dtype="float32")
    model.generation_config.eos_token_id = None  # every response runs to its full length
    best = (0.0, "")
    for cache in (None, "static"):
        for batch in (16, 32, 64):
            seconds = min(generate_seconds(model, work, batch, cache) for _ in range(2))
            print(f"generate, batch {batch}, {cache or 'dynamic'} cache: {tokens / seconds:,.0f} tokens/s")
            best = max(best, (tokens / seconds, f"{batch} {cache or ''}"))
    batch, cache = int(best[1].split()[0]), [*best[1].split(), None][1]
    ours = Ours(model, REQUESTS)
    ours.seconds(work)
    pairs = [(ours.seconds(work), generate_seconds(model, work, batch, cache)) for _ in range(rounds)]  # taken in turn
    ours.close()
    mine, theirs = (tokens / statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(theirs_seconds / our_seconds for our_seconds, theirs_seconds in pairs)
    print(f"embedded engine: {mine:,.0f} tokens/s; generate at its best (batch {batch}, {cache or 'dynamic'}): {theirs:,.0f}")
    ok = ratio >= LIMIT
    print(
        json.dumps(
            {
                "name": "engine",
                "ratio": round(ratio, 3),
                "ours": round(mine),
                "baseline": round(theirs),
                "limit": LIMIT,
                "ok": ok,
            }
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
