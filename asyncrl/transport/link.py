"""A client's line to the broker: one DEALER, a heartbeat, and the deadline on the broker's silence."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from asyncrl.errors import DeadlineExceeded, FrameError, MessageTooLarge, StreamClosed, TransportError
from asyncrl.transport.blocks import Blocks
from asyncrl.transport.loop_socket import Frames, LoopSocket, open_socket
from asyncrl.transport.wire import read_from_broker, write_frames

MAX_FRAME_BYTES = 2**33
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 60.0
_ERRORS = {kind.__name__: kind for kind in (StreamClosed, MessageTooLarge)}


def error_of(kind: str, text: str) -> TransportError:
    """The error that the broker named."""
    known = _ERRORS.get(kind)
    return known(text) if known is not None else TransportError(f"the queue refused: {kind}: {text}")


class Link:
    """Opened on the running loop. `beat(number)` gives the body of a heartbeat; `on_message(kind, fields, payloads)` gets what
    the broker says; `on_silence(error)` is called at each heartbeat for which the broker was silent for `silence_seconds`.

    Silence is counted in heartbeats that stayed unanswered, so a loop that was held up does not take its own delay for silence.
    """

    def __init__(
        self,
        address: str,
        *,
        beat: Callable[[int], Sequence[Any]],
        on_message: Callable[[str, list[Any], list[memoryview]], None],
        on_silence: Callable[[DeadlineExceeded], None],
        heartbeat_seconds: float,
        silence_seconds: float,
    ):
        self.address = address
        self._beat, self._on_message, self._on_silence = beat, on_message, on_silence
        self._interval = min(heartbeat_seconds, silence_seconds / 4)
        self._silence_seconds = silence_seconds
        self._number = 0
        self._unanswered = 0
        self.bad_frames = 0
        socket = open_socket(zmq.DEALER, max_frame_bytes=MAX_FRAME_BYTES, identity=b"\x01" + os.urandom(15))
        socket.connect(address)
        self._socket = LoopSocket(socket, self._read)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle
        self._tick()  # the first word is who speaks

    def send(self, body: Sequence[Any], blocks: Blocks | None = None) -> None:
        """Hand over one message; nothing happens on a closed link."""
        if not self._socket.closed:
            self._socket.send(write_frames(body, blocks))

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """End of the line, heartbeat included. Closing twice is harmless."""
        self._timer.cancel()
        self._socket.close(linger_seconds=linger_seconds)

    def _tick(self) -> None:
        if self._unanswered * self._interval >= self._silence_seconds:
            self._on_silence(
                DeadlineExceeded(
                    f"the queue at {self.address} has been silent for {self._silence_seconds:g} s: "
                    "see whether the message_queue process lives"
                )
            )
        self._number += 1
        self._unanswered += 1
        self.send(self._beat(self._number))
        self._timer = self._loop.call_later(self._interval, self._tick)

    def _read(self, batch: list[Frames]) -> None:
        self._unanswered = 0
        for frames in batch:
            try:
                kind, fields, payloads = read_from_broker(frames)
            except FrameError:
                self.bad_frames += 1
                continue
            self._on_message(kind, fields, payloads)
