"""What the engine is asked for, and what it gives back. Plain values; no torch, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

FinishKind = Literal["stop", "length", "abort"]


@dataclass
class Sampling:
    """How one sequence is sampled.

    temperature 0 is greedy. `stop_token_ids` already holds the model's end tokens unless the request ignores them.
    seed in [0, 2^64); `seed_offset`: tokens of the response that the prompt already ends with, so that what follows is drawn
    as if they had been sampled here. stream_interval: tokens between updates, None for one update at the end;
    `is_incremental`: an update holds only what no update before it held.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    seed_offset: int = 0
    stream_interval: int | None = None
    is_incremental: bool = False

    def with_seed(self, seed: int) -> Sampling:
        return Sampling(
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.stop_token_ids,
            seed,
            self.seed_offset,
            self.stream_interval,
            self.is_incremental,
        )


class Finish(NamedTuple):
    """Why a sequence ended. `matched`: the stop token; `message`: why it was aborted; `status`: the same as an HTTP status, where
    that says more (503: the engine ended, and another one may go on)."""

    kind: FinishKind
    matched: int | None = None
    message: str | None = None
    status: int | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """One response in the making. `prompt` int32[P], P ≥ 1; `key` is equal for equal prompts; `sink` is the caller's own.

    spans: (version text, first output token that it computed), ascending; `prefix_version` numbers the weights that computed the
    prompt's KV, so that a prefix is never lent to a sequence that starts under other weights.
    """

    rid: str
    prompt: npt.NDArray[np.int32]
    sampling: Sampling
    sink: Any = None
    index: int = 0
    key: bytes = b""
    spans: tuple[tuple[str, int], ...] = ()
    prefix_version: int = -1
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.key = self.key or self.prompt.tobytes()


@dataclass(eq=False, slots=True)
class Update:
    """A sequence's tokens so far, from token `start` on: token_ids int32[R − start], log_probs float32[R − start]. `spans` count
    from the first token. `finish` is None while it goes on."""

    sequence: Sequence
    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    spans: tuple[tuple[str, int], ...]
    finish: Finish | None
    start: int = 0

    @property
    def num_tokens(self) -> int:
        return self.start + len(self.token_ids)
