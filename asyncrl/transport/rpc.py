"""Calls between services: plain values over one ROUTER per server and one DEALER per client.

    RpcClient.call ──[call id, [method, params], arrays…]──▶ RpcServer ── a task if it waits ──▶ handler(**params)
                   ◀─[call id, [True, value] | [False, kind, text], arrays…]──

Every call has a deadline on the caller's side. Whatever arrives at a server that is no call of ours is counted in
`stats` and answered with an error where there is a call id to answer; the server lives on.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from asyncrl.errors import DeadlineExceeded, FrameError, MalformedFrame, OversizedFrame, RemoteError, StreamClosed
from asyncrl.transport.loop_socket import Frames, LoopSocket, bind_socket, open_socket
from asyncrl.transport.security import Door
from asyncrl.transport.values import pack_values, unpack_values

MAX_CALL_BYTES = 256 * 10**6
_CALL_ID_BYTES = 8
_GOODBYE_SECONDS = 1.0  # answers already given have this long to leave a server that closes

Handler = Callable[..., Any]


class RpcServer:
    """Serves `handlers`, keyed by dotted names: functions or coroutine functions taking keyword arguments.

    `stats` counts calls, failed (a handler raised), malformed, oversized and unknown_method.
    """

    def __init__(self, handlers: Mapping[str, Handler], *, bind: str = "tcp://127.0.0.1:*", max_call_bytes: int = MAX_CALL_BYTES):
        self._handlers = dict(handlers)
        self._bind = bind
        self._max_call_bytes = max_call_bytes
        self._socket: LoopSocket | None = None
        self.address = ""  # known after `start`
        self._tasks: set[asyncio.Future[Any]] = set()
        self._waiting: deque[tuple[bytes, bytes, Handler, dict[str, Any]]] = deque()  # for a task that is about to begin
        self._begins = False
        self.stats = dict.fromkeys(("calls", "failed", "malformed", "oversized", "unknown_method"), 0)

    async def start(self, bind: str | None = None) -> str:
        """Bind, here or where the constructor said, and serve on the running loop; returns the bound address, such as
        ``tcp://127.0.0.1:20123``."""
        assert self._socket is None, "an RpcServer starts once"
        socket = open_socket(zmq.ROUTER, max_frame_bytes=self._max_call_bytes)
        try:
            self.address = await bind_socket(socket, bind or self._bind)
        except zmq.ZMQError:
            socket.close()
            raise
        self._socket = LoopSocket(socket, self._on_batch)
        return self.address

    def add(self, handlers: Mapping[str, Handler]) -> None:
        """Serve these methods too, from now on."""
        self._handlers.update(handlers)

    async def close(self) -> None:
        """Stop serving: calls in progress are cancelled, answers given are delivered. Closing twice is harmless; a handler that
        closes its own server is still answered."""
        self._waiting.clear()
        this = asyncio.current_task()
        others = [task for task in self._tasks if task is not this]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if this is not None and this in self._tasks:
            this.add_done_callback(self._close_socket)
        else:
            self._close_socket()

    def _close_socket(self, _answered: object = None) -> None:
        if self._socket is not None:
            self._socket.close(linger_seconds=_GOODBYE_SECONDS)

    def _on_batch(self, batch: list[Frames]) -> None:
        for frames in batch:
            self._on_frames(frames)

    def _on_frames(self, frames: Frames) -> None:
        if len(frames) < 3 or len(frames[1]) != _CALL_ID_BYTES:
            self.stats["malformed"] += 1
            return
        peer, call_id = frames[0], frames[1]
        try:
            method, params = self._parse(frames[2:])
        except FrameError as error:
            self.stats["oversized" if isinstance(error, OversizedFrame) else "malformed"] += 1
            self._answer(peer, call_id, [False, type(error).__name__, str(error)])
            return
        handler = self._handlers.get(method)
        if handler is None:
            self.stats["unknown_method"] += 1
            known = ", ".join(sorted(self._handlers))
            self._answer(peer, call_id, [False, "UnknownMethod", f"no method {method!r} here; there are {known}"])
            return
        self.stats["calls"] += 1
        self._waiting.append((peer, call_id, handler, params))
        if not self._begins:
            self._go_on()

    def _go_on(self) -> None:
        """Handlers begin in the order of their calls: one that does not wait comes after a task that was made before it."""
        self._begins = False
        while self._waiting and not self._begins:
            self._begin(*self._waiting.popleft())

    def _begin(self, peer: bytes, call_id: bytes, handler: Handler, params: dict[str, Any]) -> None:
        try:
            value = handler(**params)
            if not inspect.isawaitable(value):
                self._answer(peer, call_id, [True, value])
                return
        except Exception as error:  # the boundary between a service and its callers: every error is the caller's to read
            self._refuse(peer, call_id, error)
            return
        task = asyncio.ensure_future(value)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, peer, call_id))
        self._begins = True
        asyncio.get_running_loop().call_soon(self._go_on)  # after the task's first step

    def _parse(self, frames: Frames) -> tuple[str, dict[str, Any]]:
        size = sum(map(len, frames))
        if size > self._max_call_bytes:
            raise OversizedFrame(f"a call of {size} bytes arrived, the server admits {self._max_call_bytes}")
        body = unpack_values(frames)
        if not (isinstance(body, list) and len(body) == 2 and isinstance(body[0], str) and isinstance(body[1], dict)):
            raise MalformedFrame("a call must be [method, params]")
        if not all(isinstance(name, str) for name in body[1]):
            raise MalformedFrame("parameter names must be text")
        return body[0], body[1]

    def _ended(self, peer: bytes, call_id: bytes, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        try:
            self._answer(peer, call_id, [True, task.result()])
        except Exception as error:  # the same boundary
            self._refuse(peer, call_id, error)

    def _refuse(self, peer: bytes, call_id: bytes, error: Exception) -> None:
        self.stats["failed"] += 1
        self._answer(peer, call_id, [False, type(error).__name__, str(error)])

    def _answer(self, peer: bytes, call_id: bytes, body: Any) -> None:
        self._send([peer, call_id, *pack_values(body)])

    def _send(self, frames: Frames) -> None:
        if self._socket is not None and not self._socket.closed:
            self._socket.send(frames)


class RpcClient:
    """Calls one server; any number of calls may be outstanding. Lives on the loop of its first call."""

    def __init__(self, address: str, *, max_call_bytes: int = MAX_CALL_BYTES):
        self.address = address
        self._max_call_bytes = max_call_bytes
        self._socket: LoopSocket | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[bytes, asyncio.Future[Frames]] = {}
        self._closed = False

    async def call(self, method: str, *, timeout: float, **params: Any) -> Any:
        """The method's value. Raises RemoteError when it raised, DeadlineExceeded after `timeout` seconds of silence,
        StreamClosed when this client is closed meanwhile, FrameError when the answer is no answer."""
        if self._closed:
            raise StreamClosed(f"{method}: the client of {self.address} is closed")
        if self._socket is None:
            socket = open_socket(zmq.DEALER, max_frame_bytes=self._max_call_bytes)
            socket.connect(self.address)
            self._socket = LoopSocket(socket, self._on_batch)
        frames = pack_values([method, params])
        call_id = next(self._numbers).to_bytes(_CALL_ID_BYTES, "big")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Frames] = loop.create_future()
        self._waiting[call_id] = answer
        deadline = loop.call_later(timeout, self._give_up, answer, method, timeout)
        try:
            self._socket.send([call_id, *frames])
            reply = await answer
        finally:
            deadline.cancel()
            del self._waiting[call_id]
        return _value_of(method, reply)

    async def close(self) -> None:
        """Outstanding calls raise StreamClosed. Closing twice is harmless."""
        self._closed = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(StreamClosed(f"the client of {self.address} was closed during the call"))
        if self._socket is not None:
            self._socket.close()

    def _give_up(self, answer: asyncio.Future[Frames], method: str, timeout: float) -> None:
        if not answer.done():
            answer.set_exception(_silent(method, self.address, timeout))

    def _on_batch(self, batch: list[Frames]) -> None:
        for frames in batch:
            answer = self._waiting.get(frames[0])  # None: its caller gave up
            if answer is not None and not answer.done():
                answer.set_result(frames[1:])


def call_once(address: str, method: str, *, timeout: float, door: Door | None = None, **params: Any) -> Any:
    """One blocking call with a socket of its own, for the command line and for threads; `door`: of the run that is called, where
    it is not this process's. Raises as RpcClient.call does."""
    call_id = (1).to_bytes(_CALL_ID_BYTES, "big")
    deadline = time.monotonic() + timeout
    with open_socket(zmq.DEALER, max_frame_bytes=MAX_CALL_BYTES, door=door) as socket:
        socket.connect(address)
        socket.send_multipart([call_id, *pack_values([method, params])])
        while (left := deadline - time.monotonic()) > 0 and socket.poll(int(left * 1000) + 1):
            frames = socket.recv_multipart()
            if frames[0] == call_id:
                return _value_of(method, frames[1:])
    raise _silent(method, address, timeout)


def _value_of(method: str, frames: Frames) -> Any:
    match unpack_values(frames):
        case [True, value]:
            return value
        case [False, str(kind), str(text)]:
            raise RemoteError(method, kind, text)
    raise MalformedFrame(f"{method}: the answer is neither a value nor an error")


def _silent(method: str, address: str, timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{method} at {address} was not answered within {timeout:g} s: see whether that process lives")
