"""A teacher without a model: its log-probs follow from the tokens, and every call takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.protocols import Judgement

Tokens = npt.NDArray[np.int32]
Judge = Callable[[Tokens, Tokens], Judgement]


def by_the_tokens(prompt: Tokens, response: Tokens) -> Judgement:
    """−token/64 of each: finite, and the same for the same tokens."""
    return Judgement((-response / 64).astype(np.float32))


class FakeTeacher:
    """`protocols.Teacher`. judge(prompt, response): what it says; seconds: of a call."""

    def __init__(self, judge: Judge = by_the_tokens, *, seconds: float = 0.01):
        self._judge, self._seconds = judge, seconds

    async def judge(self, samples: Sequence[tuple[Tokens, Tokens]]) -> list[Judgement]:
        await asyncio.sleep(self._seconds)
        return [self._judge(prompt, response) for prompt, response in samples]

    async def close(self) -> None:
        """Nothing to give up."""
