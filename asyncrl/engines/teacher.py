"""A teacher behind SGLang's HTTP protocol: log-probs of tokens that the student sampled.

    judge ─▶ POST /generate {max_new_tokens: 0, logprob_start_len: P − 1} ─▶ the last R of meta_info.input_token_logprobs

A server that is away is asked again until the deadline; one that refuses a call of several is asked about each alone, so that a
sample which cannot be judged does not fail its neighbours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson

from asyncrl.protocols import Judgement

log = logging.getLogger(__name__)
MAX_CALLS = 8  # open at once
RETRY_SECONDS = 0.5
MALFORMED = (ValueError, LookupError, TypeError)

Tokens = npt.NDArray[np.int32]
Sample = tuple[Tokens, Tokens]


class Refused(Exception):
    """The server does not judge this call."""


class HttpTeacher:
    """See `protocols.Teacher`. timeout_seconds: of each call, its retries included, from when it has its turn."""

    def __init__(self, url: str, *, token: str | None, temperature: float, timeout_seconds: float):
        self._url, self._temperature, self._timeout_seconds = url, temperature, timeout_seconds
        self._headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        self._session: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(MAX_CALLS)

    async def judge(self, samples: Sequence[Sample]) -> list[Judgement]:
        judged = [Judgement(np.zeros(0, np.float32))] * len(samples)
        wanted = [index for index, (_, response) in enumerate(samples) if len(response)]
        if wanted:
            answers = await self._judge([samples[index] for index in wanted])
            for index, answer in zip(wanted, answers, strict=True):
                judged[index] = answer
        return judged

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _judge(self, samples: Sequence[Sample]) -> list[Judgement]:
        try:
            return await self._in_turn(samples)
        except Refused as error:
            if len(samples) == 1:
                return [Judgement(None, str(error))]
            return [(await self._judge([sample]))[0] for sample in samples]

    async def _in_turn(self, samples: Sequence[Sample]) -> list[Judgement]:
        why = "no answer"
        async with self._turns:
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    while True:
                        try:
                            return await self._ask(samples)
                        except (aiohttp.ClientError, OSError) as error:
                            why = str(error) or type(error).__name__
                            log.warning("the teacher at %s: %s", self._url, why)
                        await asyncio.sleep(RETRY_SECONDS)
            except TimeoutError:
                failure = f"no answer within {self._timeout_seconds:g} s (algorithm.teacher.timeout_seconds): {why}"
                return [Judgement(None, failure)] * len(samples)

    async def _ask(self, samples: Sequence[Sample]) -> list[Judgement]:
        """Raises Refused, aiohttp's errors and OSError."""
        self._session = self._session or aiohttp.ClientSession(headers=self._headers)
        async with self._session.post(f"{self._url}/generate", data=orjson.dumps(self._payload(samples))) as answer:
            body = await answer.read()
            if answer.status >= 500:
                raise aiohttp.ClientError(f"HTTP {answer.status}: {body[:300].decode(errors='replace')}")
            if answer.status != 200:
                raise Refused(f"HTTP {answer.status}: {body[:300].decode(errors='replace')}")
        try:
            responses = orjson.loads(body)
            return [judgement_of(response, sample) for response, sample in zip(responses, samples, strict=True)]
        except MALFORMED as error:
            raise Refused(f"its answer is not SGLang's: {type(error).__name__}: {error}") from error

    def _payload(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {
            "input_ids": [[*prompt.tolist(), *response.tolist()] for prompt, response in samples],
            "sampling_params": {"max_new_tokens": 0, "temperature": self._temperature},
            "return_logprob": True,
            "logprob_start_len": [len(prompt) - 1 for prompt, _ in samples],
        }


def judgement_of(response: dict[str, Any], sample: Sample) -> Judgement:
    """From one response object. Raises ValueError, LookupError, TypeError for one that is not SGLang's."""
    tokens = sample[1]
    entries = response["meta_info"]["input_token_logprobs"][-len(tokens) :]
    if [entry[1] for entry in entries] != tokens.tolist():
        return Judgement(None, "its log-probs are not of the tokens that were sent")
    values = [entry[0] for entry in entries]
    log_probs = np.array([-np.inf if value is None else value for value in values], np.float32)  # JSON has no infinity
    return Judgement(None, "a log-prob is not a number") if np.isnan(log_probs).any() else Judgement(log_probs)
