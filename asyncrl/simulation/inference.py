"""A fleet without models: answers are drawn from seeds, time passes on the event loop's clock, versions change when told to."""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from asyncrl.clock import Clock
from asyncrl.protocols import Completion, FleetView, GenerateRequest, MemberRequest

NumTokens = Callable[[GenerateRequest, MemberRequest], int]
VOCABULARY = 64


class FakeInference:
    """`protocols.InferenceEngine`. A token of a member appears every `token_seconds`; a member's answer depends on its seed and
    the prompt alone; each token carries the version that `set_version` (or `update`) had named by the time it appeared.

    num_tokens: length of an answer, by default drawn from 1 … max_new_tokens; failure: why a member fails, or None.
    max_running: members decoded at once, the others wait their turn; None is no limit.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        token_seconds: float = 0.01,
        version: int = 0,
        num_tokens: NumTokens | None = None,
        failure: Callable[[MemberRequest], str | None] = lambda member: None,
        max_running: int | None = None,
        name: str = "inference/0",
    ):
        self._clock, self._token_seconds, self._name = clock, token_seconds, name
        self._num_tokens, self._failure = num_tokens or _drawn_length, failure
        self._changes: list[tuple[float, int]] = [(-float("inf"), version)]
        self._turns = asyncio.Semaphore(max_running) if max_running else None
        self._aborts: dict[str, asyncio.Event] = {}

    def set_version(self, version: int) -> None:
        """Tokens that appear from now on are of this version."""
        self._changes.append((self._clock.now(), version))

    def update(self, view: FleetView) -> None:
        """As `FleetClient.update`: the confirmed version is what the servers sample with."""
        if view.confirmed is not None and view.confirmed != self._changes[-1][1]:
            self.set_version(view.confirmed)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Sequence[Completion]]:
        done: asyncio.Queue[Completion] = asyncio.Queue()
        self._aborts.update({member.rid: asyncio.Event() for member in request.members})
        tasks = [asyncio.create_task(self._member(request, member, done)) for member in request.members]
        try:
            for _ in tasks:
                yield [await done.get()]
        finally:
            for task in tasks:
                task.cancel()
            for member in request.members:
                self._aborts.pop(member.rid, None)

    async def abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            if rid in self._aborts:
                self._aborts[rid].set()

    async def close(self) -> None:
        await self.abort(list(self._aborts))

    async def _member(self, request: GenerateRequest, member: MemberRequest, done: asyncio.Queue[Completion]) -> None:
        deadline = self._clock.now() + request.timeout_seconds
        if self._turns is not None:
            await self._turns.acquire()
        try:
            done.put_nowait(await self._answer(request, member, deadline))
        finally:
            if self._turns is not None:
                self._turns.release()

    async def _answer(self, request: GenerateRequest, member: MemberRequest, deadline: float) -> Completion:
        failure = self._failure(member)
        began = self._clock.now()
        length = 0 if failure else min(self._num_tokens(request, member), request.sampling.max_new_tokens)
        aborted = await self._wait(self._aborts[member.rid], min(began + length * self._token_seconds, deadline))
        if not aborted and failure is None and began + length * self._token_seconds > deadline:
            failure = f"server {self._name} did not finish within {request.timeout_seconds:g} s"
        if failure is not None:
            return self._completion(request, member, 0, began, "failed", failure)
        if aborted:
            length = min(length, int((self._clock.now() - began) / self._token_seconds))
            return self._completion(request, member, length, began, "abort", "aborted: aborted by request")
        reason = "length" if length == request.sampling.max_new_tokens else "stop"
        return self._completion(request, member, length, began, reason, None)

    async def _wait(self, aborted: asyncio.Event, until: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, until - self._clock.now())):
                return await aborted.wait()
        except TimeoutError:
            return False

    def _completion(
        self, request: GenerateRequest, member: MemberRequest, length: int, began: float, reason: str, failure: str | None
    ) -> Completion:
        random = np.random.default_rng(_digest(request, member))
        times = [time for time, _ in self._changes]
        versions = [
            self._changes[bisect_right(times, began + (token + 1) * self._token_seconds) - 1][1] for token in range(length)
        ]
        return Completion(
            index=member.index,
            token_ids=random.integers(0, VOCABULARY, length, dtype=np.int32),
            log_probs=-random.random(length, dtype=np.float32),
            versions=np.asarray(versions, np.int32),
            finish_reason=reason,  # type: ignore[arg-type]
            server=self._name,
            failure=failure,
        )


def _digest(request: GenerateRequest, member: MemberRequest) -> int:
    content = request.prompt_tokens.tobytes() + member.seed.to_bytes(16, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _drawn_length(request: GenerateRequest, member: MemberRequest) -> int:
    return 1 + _digest(request, member) % request.sampling.max_new_tokens
