"""What a rollouter knows of inference: ask for the members of a group, get each as it finishes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from asyncrl.messages import FinishReason


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `stop_token_ids` come on top of the model's own end tokens, which `ignore_eos` switches off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)  # one is made per response or group, as of the two below: a frozen one takes four times as long to make
class MemberRequest:
    """One response wanted: `index` in the group, request id, and the seed that with weights and prompt determines it."""

    index: int
    rid: str
    seed: int


@dataclass(slots=True)
class GenerateRequest:
    """Responses to one prompt; members share its prefill. `server` asks for one server by name; None lets the fleet choose.
    `conversation`: what this is a turn of; the server that had the turn before, and so its prefix, is preferred."""

    prompt_tokens: npt.NDArray[np.int32]
    members: tuple[MemberRequest, ...]
    sampling: SamplingParams
    timeout_seconds: float
    server: str | None = None
    conversation: str | None = None


@dataclass(slots=True)
class Completion:
    """One finished response. token_ids int32[R], log_probs float32[R] (of the temperature-scaled full distribution),
    versions int32[R]. `failure` says why there is no usable response (then `finish_reason` is "abort" or "failed")."""

    index: int
    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason
    server: str
    failure: str | None = None


def failed_completion(index: int, server: str, failure: str, *, reason: FinishReason = "failed") -> Completion:
    """A member without a response, and why."""
    nothing = np.zeros(0, np.int32)
    return Completion(index, nothing, np.zeros(0, np.float32), nothing, reason, server, failure)


class InferenceEngine(Protocol):
    """A client of one or more inference servers."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Sequence[Completion]]:
        """Yield exactly one completion per member, each as soon as it is finished, together with those that finished at the same
        moment; a member that failed is yielded with `failure` set (server lost, deadline passed), never raised, so that the
        others are not lost with it."""

    async def abort(self, rids: Sequence[str]) -> None:
        """End these requests early; they are yielded with finish reason "abort"."""

    async def close(self) -> None:
        """Give up connections."""
