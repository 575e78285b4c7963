"""A ZeroMQ socket on an asyncio loop: everything that waits is read at one wake-up and handed over as one batch.

ZeroMQ's descriptor tells of an arrival once, and whatever is asked of the socket may take that word: a send, or a look at its
events. So a read goes on until a look finds nothing, and after a send there is another look; a turn without one needs none.
High-water marks are off (they are no bound): what a peer may have on its way is bounded by the protocol above.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from asyncrl.transport import security

PORTS = range(20_000, 32_000)  # outside the ranges from which systems draw ports for outgoing connections
HELD_SECONDS = 5.0  # a socket that is closed may hold its port for a moment
READ_BATCH = 512  # multiparts taken at one wake-up before other callbacks get their turn

Part = bytes | memoryview | zmq.Frame
Frames = list[Any]  # of bytes, and zmq.Frame where that was asked for
_LAST = int(zmq.NOBLOCK)  # plain ints: combining the enum's members costs more than a send
_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


def open_socket(
    kind: int, *, max_frame_bytes: int, identity: bytes | None = None, door: security.Door | None = None
) -> zmq.Socket[bytes]:
    """A socket without lingering and without high-water marks, guarded by `door` (None: this process's); a peer that sends a
    frame of more than twice `max_frame_bytes` is cut off by ZeroMQ itself, smaller offenders are for the protocol to refuse and
    count."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_frame_bytes + (1 << 20))
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.BACKLOG, 1024)
    else:
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if identity is not None:
        socket.setsockopt(zmq.ROUTING_ID, identity)
    (door or security.door()).guard(socket, serves=kind == zmq.ROUTER)
    return socket


async def bind_socket(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind where this process's door has it, and say where others reach it. An address that ends in ``:*`` gets a free port of
    PORTS, which the system gives to nobody else meanwhile: so a process that takes another's place can bind where that one was,
    once it has let go. Raises ZMQError, for a port that stays taken after HELD_SECONDS."""
    door = security.door()
    address = door.place(address)
    if address.startswith("tcp://") and address.endswith(":*"):
        socket.bind_to_random_port(address[: -len(":*")], min_port=PORTS.start, max_port=PORTS.stop, max_tries=len(PORTS))
    else:
        await _bind_once_free(socket, address)
    return door.known_as(bound_address(socket))


async def _bind_once_free(socket: zmq.Socket[bytes], address: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + HELD_SECONDS
    while True:
        try:
            socket.bind(address)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or loop.time() >= deadline:
                raise
        await asyncio.sleep(HELD_SECONDS / 100)


def bound_address(socket: zmq.Socket[bytes]) -> str:
    """Where `socket` was bound last, its ephemeral port resolved: ``tcp://127.0.0.1:40123``."""
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


class LoopSocket:
    """Owns `socket` from here on. `on_batch` is called on the loop with the multiparts that waited, in order. Their parts from
    number `copied_parts` on are `zmq.Frame`s, which own ZeroMQ's memory and can be sent on without a copy."""

    def __init__(self, socket: zmq.Socket[bytes], on_batch: Callable[[list[Frames]], None], *, copied_parts: int = sys.maxsize):
        self._socket = socket
        self._receive_part, self._get = socket.recv, socket.getsockopt
        self._send_part: Callable[..., Any] = super(zmq.Socket, socket).send  # without the options that pyzmq adds in Python
        self._on_batch = on_batch
        self._copied_parts = copied_parts
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._next_read: asyncio.Handle | None = None
        self._reading = False
        self._look_due = False  # something was sent while reading
        self.closed = False
        self._loop.add_reader(self._descriptor, self._read)
        self._look_again()

    def send(self, frames: Sequence[Part]) -> None:
        """Hand a multipart to ZeroMQ; never blocks. To a peer that is gone, a ROUTER's message is dropped."""
        assert not self.closed, "send on a closed socket"
        *first, last = frames
        for frame in first:
            self._send_part(frame, _MORE, type(frame) is not zmq.Frame)
        self._send_part(last, _LAST, type(last) is not zmq.Frame)
        if self._reading:
            self._look_due = True
        else:
            self._look_again()

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """Stop reading and close; what was sent has `linger_seconds` to leave."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._descriptor)
        if self._next_read is not None:
            self._next_read.cancel()
        self._socket.close(linger=int(linger_seconds * 1000))

    def _read(self) -> None:
        if self._next_read is not None:
            self._next_read.cancel()
            self._next_read = None
        if self.closed:
            return
        batch: list[Frames] = []
        try:
            batch.append(self._receive())
            while self._is_readable():
                if len(batch) == READ_BATCH:
                    self._look_due = True
                    break
                batch.append(self._receive())
        except zmq.Again:  # what woke us was not a whole message
            pass
        self._reading = True
        try:
            if batch:
                self._on_batch(batch)
        finally:
            self._reading = False
            if self._look_due and not self.closed:
                self._look_due = False
                self._look_again()

    def _receive(self) -> Frames:
        part = self._receive_part(_LAST, False)
        frames: Frames = [part.bytes]
        while part.more:
            part = self._receive_part(_LAST, False)
            frames.append(part.bytes if len(frames) < self._copied_parts else part)
        return frames

    def _look_again(self) -> None:
        if self._next_read is None and self._is_readable():
            self._next_read = self._loop.call_soon(self._read)

    def _is_readable(self) -> bool:
        return bool(int(self._get(_EVENTS)) & _READABLE)  # asked, because failing to receive costs more
