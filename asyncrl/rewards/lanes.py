"""The two ways of feeding a child: one call after the other (sync functions), many at once (async functions).

What both promise: every call comes to an outcome within a bounded time, whatever its function does.
- A call that is past limit + grace without an answer is a timeout; its child is killed and replaced, and the calls that waited
  behind it, or ran beside it, are made again.
- A child that dies by itself (a crash, the kernel's out-of-memory killer): the call it was at is made once more, and then it
  failed as "reward worker died"; calls that had not begun are made again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.rewards.nursery import Child, Nursery
from asyncrl.rewards.outcome import CallOutcome, Item, failed, timed_out

GRACE_SECONDS = 0.5  # beyond the limit, for the answer to arrive; the most of it
GRACE_SHARE = 0.1  # of the limit, where a call that hangs keeps its lane from the next
DEATHS_ALLOWED = 1

Call = tuple[int, Item]
"""(function index, the fields that it takes)."""


@dataclass
class LaneCounts:
    """For `status`."""

    calls: int = 0
    killed: int = 0
    died: int = 0


class SerialLane:
    """Sync functions. The child answers in the order of the calls, so the call it owes next is the one it is at, and it has been
    at it since its last answer: silence for limit + grace is a hung call."""

    def __init__(self, nursery: Nursery, limit_seconds: float, counts: LaneCounts):
        self._nursery, self._limit, self._counts = nursery, limit_seconds, counts
        self._turn = asyncio.Lock()
        self._child: Child | None = None

    async def run(self, calls: Sequence[Call]) -> list[CallOutcome]:
        """The outcomes, in order."""
        async with self._turn:
            outcomes: dict[int, CallOutcome] = {}
            deaths: Counter[int] = Counter()
            left = deque(range(len(calls)))
            while left:
                child = await self._send([[position, *calls[position]] for position in left])
                await self._collect(child, left, outcomes, deaths)
            return [outcomes[position] for position in range(len(calls))]

    async def _send(self, frame: Any) -> Child:
        if self._child is None:
            self._child = await self._nursery.take("serial")
        self._child.send(frame)
        return self._child

    async def _collect(self, child: Child, left: deque[int], outcomes: dict[int, CallOutcome], deaths: Counter[int]) -> None:
        """Take answers until nothing is left or the child is lost; then what is left is to be sent to another."""
        try:
            while left:
                async with asyncio.timeout(self._limit + min(GRACE_SECONDS, GRACE_SHARE * self._limit)):
                    position, *outcome = await child.read()
                assert position == left[0], (position, left[0])
                outcomes[left.popleft()] = CallOutcome(*outcome)
                self._counts.calls += 1
        except TimeoutError:
            self._child = None
            self._counts.killed += 1
            outcomes[left.popleft()] = timed_out(self._limit)
            await self._nursery.discard(child)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._child = None
            self._counts.died += 1
            how = await self._nursery.discard(child)
            deaths[left[0]] += 1
            if deaths[left[0]] > DEATHS_ALLOWED:
                outcomes[left.popleft()] = failed(f"reward worker died ({how})")
        except asyncio.CancelledError:  # the answers still to come belong to nobody: this child is of no more use
            self._child = None
            child.kill()
            raise


class _Lost(Exception):
    """The child is gone: it ended by itself for a `reason`, or was killed for a blocked loop while the code of the call `blamed`
    was running (None: unknown)."""

    def __init__(self, *, reason: str | None = None, blamed: int | None = None):
        self.reason, self.blamed = reason, blamed


class ConcurrentLane:
    """Async functions: up to `concurrency` calls open in one child. The child answers by the limit itself; if it does not, its
    loop is blocked, and the mark in shared memory says by whom. The blamed call is a timeout if it has had its time; without a
    mark, every call that has had its time is. All others are made again."""

    def __init__(self, nursery: Nursery, limit_seconds: float, concurrency: int, counts: LaneCounts):
        self._nursery, self._limit, self._counts = nursery, limit_seconds, counts
        self._open = asyncio.Semaphore(concurrency)
        self._starting = asyncio.Lock()
        self._child: Child | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[CallOutcome]] = {}
        self._ids = itertools.count()

    async def run(self, calls: Sequence[Call]) -> list[CallOutcome]:
        """The outcomes, in order."""
        return list(await asyncio.gather(*(self._run(call) for call in calls)))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _run(self, call: Call) -> CallOutcome:
        deaths = 0
        async with self._open:
            while True:
                child, call_id, began = await self._living(), next(self._ids), asyncio.get_running_loop().time()
                try:
                    return await self._attempt(child, call_id, call)
                except _Lost as lost:
                    deaths += lost.reason is not None
                    if deaths > DEATHS_ALLOWED:
                        return failed(f"reward worker died ({lost.reason})")
                    had_its_time = asyncio.get_running_loop().time() - began >= self._limit
                    if lost.reason is None and lost.blamed in (call_id, None) and had_its_time:
                        return timed_out(self._limit)

    async def _attempt(self, child: Child, call_id: int, call: Call) -> CallOutcome:
        answer: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        child.send([[call_id, *call]])
        try:
            async with asyncio.timeout(self._limit + GRACE_SECONDS):
                outcome = await answer
        except TimeoutError:
            blamed = child.marked_call()
            await self._kill_blocked(child, blamed)
            raise _Lost(blamed=blamed) from None
        finally:
            self._waiting.pop(call_id, None)
        self._counts.calls += 1
        return outcome

    async def _living(self) -> Child:
        async with self._starting:
            if self._child is None:
                self._child = await self._nursery.take("concurrent")
                self._reader = asyncio.create_task(self._read(self._child))
            return self._child

    async def _read(self, child: Child) -> None:
        """Hand answers to their callers until the child is gone."""
        try:
            while True:
                call_id, *outcome = await child.read()
                answer = self._waiting.get(call_id)
                if answer is not None and not answer.done():
                    answer.set_result(CallOutcome(*outcome))
        except (asyncio.IncompleteReadError, ConnectionError):
            if self._child is child:  # nobody killed it
                self._child = None
                self._counts.died += 1
                self._lose(_Lost(reason=await self._nursery.discard(child)))

    async def _kill_blocked(self, child: Child, blamed: int | None) -> None:
        if self._child is not child:
            return
        self._child = None
        self._counts.killed += 1
        child.kill()
        self._lose(_Lost(blamed=blamed))
        await self._nursery.discard(child)

    def _lose(self, lost: _Lost) -> None:
        """Every call that is open learns that its child is gone."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(lost)
