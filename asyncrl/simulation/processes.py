"""Processes that die and are started again, on a virtual clock.

A `Row` runs a service; `kill` ends it as SIGKILL would: from that moment nothing that it says reaches anybody (`Lines.cut`), and
what it was waiting for it never hears. After a while another process of that row begins, with nothing but what the others know.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, cast

from asyncrl.protocols.queue import Message
from asyncrl.services.service import AddressBook
from asyncrl.transport.local import LocalQueue, LocalReceiver, LocalSender

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Loss:
    """The process of this row (``rollouter``, ``reward``, ``reward/0`` …) dies at `at`, and another is up `back_after` later, in
    virtual seconds. Nothing happens where there is no process at that time."""

    row: str
    at: float
    back_after: float = 1.0


class Killed(Exception):
    """What a dead process's last coroutines get to see."""


class Lines:
    """A process's lines to the others. `seconds`: how long a call is on its way there, and its answer on the way back."""

    def __init__(self, seconds: float = 0.0):
        self.is_cut = False
        self._seconds = seconds
        self._on_cut: list[Callable[[], None]] = []

    def cut(self) -> None:
        self.is_cut = True
        for abandon in self._on_cut:
            abandon()

    def on_cut(self, abandon: Callable[[], None]) -> None:
        """Called when the process dies: its end of a queue is abandoned."""
        self._on_cut.append(abandon)

    def to(self, target: T) -> T:
        """The target, as this process reaches it."""
        return cast(T, _Line(target, self))

    async def carry(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        await self._way()
        answer = method(*args, **kwargs)
        if inspect.isawaitable(answer):
            answer = await answer
        await self._way()
        return answer

    async def _way(self) -> None:
        if self._seconds and not self.is_cut:
            await asyncio.sleep(self._seconds)
        self.check()

    def check(self) -> None:
        """Raises Killed in a dead process."""
        if self.is_cut:
            raise Killed("this process was killed")


class _Line:
    def __init__(self, target: Any, lines: Lines):
        self._target, self._lines = target, lines

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._lines.carry(method, *args, **kwargs)

        return call


class Row(Generic[S]):
    """`begin(lines)` makes the service of a new process; `service` is that of the newest, up or not."""

    def __init__(self, begin: Callable[[Lines], S], *, seconds: float = 0.0):
        self._begin, self._seconds = begin, seconds
        self._running: asyncio.Task[None] | None = None
        self._back_after = 0.0
        self.lives = 0
        self.is_up = False
        self._lines = Lines(seconds)
        self.service = begin(self._lines)
        self.began = asyncio.Event()

    async def live(self, book: AddressBook) -> None:
        """Until the service returns by itself. Raises what it raises."""
        while True:
            self.is_up = True
            self.lives += 1
            self.began.set()
            self.began = asyncio.Event()
            run: Any = cast(Any, self.service).run(book)
            self._running = asyncio.ensure_future(run)
            try:
                await asyncio.wait((self._running,))
            finally:
                self.is_up = False
                self._running.cancel()
            if not self._lines.is_cut:
                self._running.result()
                return
            if not self._running.cancelled():
                self._running.exception()  # it died in the middle of something
            await asyncio.sleep(self._back_after)
            self._lines = Lines(self._seconds)
            self.service = self._begin(self._lines)

    def kill(self, back_after: float) -> bool:
        """The process is gone; another is up so much later. False: there was none."""
        if not self.is_up or self._running is None or self._running.done() or self._lines.is_cut:
            return False
        self.is_up, self._back_after = False, back_after
        self._lines.cut()
        self._running.cancel()
        return True


class LateSender:
    """A sender that opens when it is first used, as one over sockets does."""

    def __init__(self, queue: LocalQueue, topic: str, producer: str, lines: Lines):
        self._queue, self._topic, self._producer, self._lines = queue, topic, producer, lines
        self._sender: LocalSender | None = None
        lines.on_cut(self._abandon)

    async def send(self, messages: Sequence[Message]) -> None:
        await self._open().send(messages)
        self._lines.check()

    async def close(self) -> None:
        await self._open().close()

    def _open(self) -> LocalSender:
        self._lines.check()
        if self._sender is None:
            self._sender = self._queue.sender(self._topic, producer=self._producer)
        return self._sender

    def _abandon(self) -> None:
        if self._sender is not None:
            self._sender.abandon()


class MortalReceiver:
    """A receiver whose process may die. `before`: that of the process in whose place this one is; its leases end when this one
    first asks, or by themselves."""

    def __init__(self, receiver: LocalReceiver, lines: Lines, before: LocalReceiver | None = None):
        self._receiver, self._lines, self._before = receiver, lines, before
        lines.on_cut(receiver.abandon)

    async def receive(self, *, max_items: int, timeout: float) -> Any:
        if self._before is not None:
            before, self._before = self._before, None
            await before.close()
        deliveries = await self._receiver.receive(max_items=max_items, timeout=timeout)
        self._lines.check()
        return deliveries

    async def settle(self, ids: Sequence[str]) -> None:
        self._lines.check()
        await self._receiver.settle(ids)

    async def close(self) -> None:
        self._lines.check()
        await self._receiver.close()


async def never() -> NoReturn:
    """What a call to a dead process comes to."""
    await asyncio.Event().wait()
    raise AssertionError("an event that nobody sets")
