"""A consumer's end of a topic over sockets: `protocols.queue.Receiver`.

A `receive` is one request, answered by the broker as soon as there is something, or when the time is over and the request is
cancelled. Deliveries are numbered: a gap means that one was lost, and the next beat has it delivered again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from asyncrl.errors import FrameError, StreamClosed, TransportError
from asyncrl.protocols.queue import Delivery
from asyncrl.transport.envelopes import unpack
from asyncrl.transport.link import HEARTBEAT_SECONDS, SILENCE_SECONDS, Link, error_of
from asyncrl.transport.records import LIFE_BITS

_GOODBYE_SECONDS = 1.0


class QueueReceiver:
    """A consumer of one topic; one `receive` at a time. `refused` counts payloads that were no message: they are reported to the
    queue, which settles them and tells its owner, and are not delivered. `consumer`: a name; a newer receiver of the same name
    takes over, with what this one had on lease. Should the queue be started anew, at the same address, it is asked again, and
    what was taken and not settled may come again (`redelivered`)."""

    def __init__(
        self,
        address: str,
        topic: str,
        *,
        consumer: str = "",
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ):
        self._address, self._topic, self._consumer = address, topic, consumer
        self._heartbeat_seconds, self._silence_seconds = heartbeat_seconds, silence_seconds
        self._link: Link | None = None
        self._inbox: deque[Delivery] = deque()
        self._request = 0
        self._max_items = 0
        self._received = 0
        self._answer: asyncio.Future[None] | None = None  # of the request that is open
        self._request_at_beat = (0, 0)  # beat, and the request open when it was sent
        self._cancelled = False  # the open request has been asked to be answered now
        self._ended = False
        self._left: asyncio.Future[None] | None = None
        self._broken: TransportError | None = None
        self.refused = 0

    async def receive(self, *, max_items: int, timeout: float) -> list[Delivery]:
        """Take up to `max_items`: at once what is there, else the first to come; [] when `timeout` seconds pass.

        Raises StreamClosed at the end of the stream or after `close`, DeadlineExceeded when the queue is silent.
        """
        assert max_items >= 1, "receive takes at least one item"
        if not self._inbox:
            await self._ask(max_items, timeout)
        return [self._inbox.popleft() for _ in range(min(max_items, len(self._inbox)))]

    async def settle(self, ids: Sequence[str]) -> None:
        """These messages are done with. Not acknowledged: what a broken connection swallows is delivered again when this
        receiver's lease ends."""
        self._open().send(["settle", self._topic, list(ids)])

    async def close(self) -> None:
        """Give the leases back. Raises DeadlineExceeded when the queue is silent; the receiver is closed all the same. Closing
        twice is harmless."""
        if self._left is not None or self._link is None or self._broken is not None:
            self.abandon()
            return
        self._left = asyncio.get_running_loop().create_future()
        try:
            self._link.send(["leave", self._topic])
            await self._left
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Stop without a word, as a killed process would; the queue notices when the lease ends."""
        if self._broken is None:
            self._broken = StreamClosed(f"this receiver of topic {self._topic} is closed")
        self._fail_waits(self._broken)
        if self._link is not None:
            self._link.close(linger_seconds=_GOODBYE_SECONDS)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> Link:
        if self._broken is not None:
            raise self._broken
        if self._link is None:
            self._link = Link(
                self._address,
                beat=self._beat,
                on_message=self._on_message,
                on_silence=self._fail_waits,
                heartbeat_seconds=self._heartbeat_seconds,
                silence_seconds=self._silence_seconds,
            )
        return self._link

    async def _ask(self, max_items: int, timeout: float) -> None:
        """Until something is in the inbox, the time is over, or the stream has ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not self._inbox:
            self._open()
            if self._ended:
                raise StreamClosed(f"topic {self._topic} has ended")
            if self._answer is None or self._answer.done():
                self._answer = loop.create_future()
                self._max_items, self._cancelled = max_items, False
                self._say_take()
            timer = loop.call_at(deadline, self._cancel)
            try:
                await self._answer
            finally:
                timer.cancel()
            if self._cancelled:
                break
        if self._ended and not self._inbox:
            raise StreamClosed(f"topic {self._topic} has ended")

    def _cancel(self) -> None:
        """The time is over: the open request is to be answered now, if need be with nothing."""
        self._cancelled = True
        if self._link is not None:
            self._link.send(["cancel", self._topic, self._request])

    def _say_take(self) -> None:
        self._request += 1
        self._open().send(["take", self._topic, self._request, self._max_items, self._received])

    def _beat(self, beat: int) -> list[Any]:
        if self._left is not None:
            return ["leave", self._topic]
        waiting = self._answer is not None and not self._answer.done()
        self._request_at_beat = (beat, self._request if waiting else 0)
        return ["receiver", self._topic, self._consumer, beat]

    def _on_message(self, kind: str, fields: list[Any], payloads: list[memoryview]) -> None:
        if kind == "deliver":
            delivery, _, num_redelivered, message_ids = fields
            self._on_deliver(delivery, num_redelivered, message_ids, payloads)
        elif kind == "beat":
            self._on_beat(*fields)
        elif kind == "end":
            self._ended = True
            self._answered()
        elif kind == "left" and self._left is not None and not self._left.done():
            self._left.set_result(None)
        elif kind == "error":
            self._broken = error_of(*fields)
            self._fail_waits(self._broken)

    def _on_deliver(self, delivery: int, num_redelivered: int, message_ids: list[str], payloads: list[memoryview]) -> None:
        self._notice_life(delivery)
        if delivery != self._received + 1:
            return  # one before it was lost: the next beat tells the broker, which gives both back
        self._received = delivery
        for number, (message_id, payload) in enumerate(zip(message_ids, payloads, strict=True)):
            try:
                self._inbox.append(Delivery(unpack(message_id, payload), number < num_redelivered))
            except FrameError as error:
                self.refused += 1
                self._open().send(["refuse", self._topic, message_id, f"{type(error).__name__}: {error}"])
        self._answered()

    def _on_beat(self, beat: int, open_request: int, delivery: int) -> None:
        """The broker has read everything that was written before the beat, and what it wrote before has come."""
        self._notice_life(delivery)
        beat_then, request_then = self._request_at_beat
        waiting = self._answer is not None and not self._answer.done()
        if delivery > self._received:
            self._open().send(["lost", self._topic, self._received])
        if beat == beat_then and waiting and request_then == self._request:
            if open_request != self._request:
                self._say_take()
            if self._cancelled:
                self._open().send(["cancel", self._topic, self._request])

    def _notice_life(self, delivery: int) -> None:
        """A broker of another life numbers its deliveries from there on."""
        if delivery >> LIFE_BITS != self._received >> LIFE_BITS:
            self._received = delivery >> LIFE_BITS << LIFE_BITS

    def _answered(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _fail_waits(self, error: TransportError) -> None:
        for future in (self._answer, self._left):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting
