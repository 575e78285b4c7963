"""The program of a process that runs reward functions: ``python -m asyncrl.rewards.child FD``.

It speaks with its parent, a reward worker, over an inherited socket, in frames of a 4-byte length and a msgpack value:

    parent                                          child
    {"functions": [[name, source, payload]…],  ──▶
     "limit_seconds", "path"}                  ◀──  {"ready": [[accepts, is_async]…]}  or  {"refused": reason}
    {"role": "serial" | "concurrent"}          ──▶
    [[call id, function index, item]…]         ──▶
                                               ◀──  [call id, score, logged, failure]   one a call, as soon as it is done

Functions run in the main thread, where signals work too. `serial` runs one call after the other; `concurrent` runs async
functions, all that are there at once. The process ends when its parent closes the socket or dies (PR_SET_PDEATHSIG: the kernel
kills it even while a function hangs). A call past its limit is the parent's to end, by killing this process; only an async
function that still yields is cancelled here. The first 8 bytes of the inherited shared memory hold the id + 1 of the async call
whose code is running, 0 for none, so that the parent knows whom to blame for a blocked loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import inspect
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Coroutine, Generator
from typing import Any

import msgpack

from asyncrl.rewards.function import FunctionSpec, RewardFunction
from asyncrl.rewards.outcome import CallOutcome, outcome_of, raised, timed_out

LENGTH = struct.Struct("!I")
MARK = struct.Struct("q")
_PR_SET_PDEATHSIG = 1


def pack(value: Any) -> bytes:
    """One frame."""
    body: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")


def main(fd: int, mark_fd: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(0)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    for inherited in (fd, mark_fd):
        os.set_inheritable(inherited, False)  # a process that a user's function starts must not hold the channel open
    channel = socket.socket(fileno=fd)
    mark = mmap.mmap(mark_fd, MARK.size)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone: nobody to answer
        hello = _read(channel)
        functions = _load(hello, channel) if hello is not None else None
        role = _read(channel) if functions is not None else None
        if functions is None or role is None:
            return
        if role["role"] == "serial":
            _serve_serially(channel, functions, hello["limit_seconds"])
        else:
            asyncio.run(_Concurrent(channel, functions, hello["limit_seconds"], mark).serve())


def _load(hello: Any, channel: socket.socket) -> list[RewardFunction] | None:
    sys.path[:] = [*hello["path"], *(path for path in sys.path if path not in hello["path"])]
    try:
        functions = [FunctionSpec(*fields).load() for fields in hello["functions"]]
    except Exception as error:  # boundary: user modules are imported here; the parent reports the reason
        channel.sendall(pack({"refused": f"{type(error).__name__}: {error}"}))
        return None
    channel.sendall(pack({"ready": [[list(function.accepts), function.is_async] for function in functions]}))
    return functions


def _serve_serially(channel: socket.socket, functions: list[RewardFunction], limit_seconds: float) -> None:
    while (calls := _read(channel)) is not None:
        for call_id, index, item in calls:
            channel.sendall(pack([call_id, *_call(functions[index], item, limit_seconds)]))


def _call(function: RewardFunction, item: Any, limit_seconds: float) -> CallOutcome:
    began = time.monotonic()
    try:
        returned = function(item)
        if inspect.isawaitable(returned):  # a sync function that hands out a coroutine
            returned = asyncio.run(_awaited(returned))
        outcome = outcome_of(returned)
    except (Exception, SystemExit) as error:  # boundary: a user's function may raise anything, and a bad sample is data
        outcome = raised(error)
    return timed_out(limit_seconds) if time.monotonic() - began > limit_seconds else outcome


async def _awaited(value: Any) -> Any:
    return await value


class _Concurrent:
    """Async functions on one event loop."""

    def __init__(self, channel: socket.socket, functions: list[RewardFunction], limit_seconds: float, mark: mmap.mmap):
        self._channel, self._functions, self._limit, self._mark = channel, functions, limit_seconds, mark
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                for call_id, index, item in unpack(await reader.readexactly(length)):
                    task = asyncio.create_task(self._answer(call_id, self._functions[index], item))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
        os._exit(0)  # the parent is gone, and what is running would only hold this process

    async def _answer(self, call_id: int, function: RewardFunction, item: Any) -> None:
        """Answer by the limit, also for a function that ignores being cancelled."""
        call = asyncio.create_task(_Marked(self._guarded(function, item), self._mark, call_id))
        done, _ = await asyncio.wait((call,), timeout=self._limit)
        if not done:
            call.cancel()
        outcome = call.result() if done else timed_out(self._limit)
        self._writer.write(pack([call_id, *outcome]))

    async def _guarded(self, function: RewardFunction, item: Any) -> CallOutcome:
        try:
            return outcome_of(await function(item))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # boundary, as in `_call`; it may cancel itself, too
            return raised(error)


class _Marked(Coroutine[Any, Any, CallOutcome]):
    """A coroutine whose every step is marked in shared memory."""

    def __init__(self, coroutine: Coroutine[Any, Any, CallOutcome], mark: mmap.mmap, call_id: int):
        self._coroutine, self._mark, self._on = coroutine, mark, MARK.pack(call_id + 1)

    def send(self, value: Any) -> Any:
        self._mark[: MARK.size] = self._on
        try:
            return self._coroutine.send(value)
        finally:
            self._mark[: MARK.size] = bytes(MARK.size)

    def throw(self, *error: Any) -> Any:
        self._mark[: MARK.size] = self._on
        try:
            return self._coroutine.throw(*error)
        finally:
            self._mark[: MARK.size] = bytes(MARK.size)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, CallOutcome]:
        return self._coroutine.__await__()


def _read(channel: socket.socket) -> Any:
    """The next frame's value; None at the end."""
    header = _exactly(channel, LENGTH.size)
    body = _exactly(channel, LENGTH.unpack(header)[0]) if header is not None else None
    return unpack(body) if body is not None else None


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
