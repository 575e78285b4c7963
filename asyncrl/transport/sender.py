"""A producer's end of a topic over sockets: `protocols.queue.Sender`.

Whatever waits when the loop comes round goes out as one write. A sender that meets no congestion writes at once and lets the
broker grant on the spot; once the broker held something back it announces first and writes what it is granted.

    send ──▶ outbox: handled … next − 1      sent   ≤ granted, but for one eager write
                                              sent   ≤ announced ≤ next
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from asyncrl.errors import MessageTooLarge, StreamClosed, TransportError, UnknownSender
from asyncrl.protocols.queue import Message
from asyncrl.transport.blocks import BLOCK_BYTES, Blocks, gathered
from asyncrl.transport.envelopes import pack
from asyncrl.transport.link import HEARTBEAT_SECONDS, SILENCE_SECONDS, Link, error_of
from asyncrl.transport.records import LIFE_BITS, Incoming

WRITE_BYTES = BLOCK_BYTES  # when so much waits it is written at once, so that the broker works while the next are encoded
EAGER_BYTES = 2 * BLOCK_BYTES  # most that is written without credit in hand


class QueueSender:
    """A producer of one topic, under the name that the queue was told to expect. Opens at the first `send` or `close`. Should the
    queue be started anew, at the same address, what it had not handled is announced again."""

    def __init__(
        self,
        address: str,
        topic: str,
        *,
        producer: str,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ):
        self._address, self._topic, self._producer = address, topic, producer
        self._heartbeat_seconds, self._silence_seconds = heartbeat_seconds, silence_seconds
        self._link: Link | None = None
        self._opened: asyncio.Future[int] | None = None  # the topic's capacity in bytes, once the queue has answered
        self._capacity_bytes = 0  # of the topic; 0 while `send` must go through `_open`
        self._closed: asyncio.Future[None] | None = None
        self._ending = False  # everything is accepted and the end has been said; beats say it again
        self._broken: TransportError | None = None
        self._outbox: deque[Incoming] = deque()  # messages number handled … next − 1
        self._announced = self._granted = self._sent = self._handled = 0
        self._eager_to = 0  # end of what was written without credit and not yet seen by the broker; 0: nothing
        self._asked_to = 0  # end of what was announced and not yet seen by the broker; 0: nothing
        self._congested = False
        self._at_beat = (0, 0, 0)  # beat, announced and sent when it was sent
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()  # (first, end, future), in order
        self._flush_due = False
        self._unwritten_bytes = 0  # of what was sent since the last flush

    async def send(self, messages: Sequence[Message]) -> None:
        """Return when every message is accepted (or dropped as a duplicate). A cancelled caller has sent them all the same.

        Raises MessageTooLarge before anything is sent, MalformedFrame for a message that breaks a rule, DeadlineExceeded when
        the queue is silent, StreamClosed after `close` or when a newer sender of this name took over.
        """
        packed = [pack(message) for message in messages]
        if not packed:
            return
        capacity_bytes = self._capacity_bytes or await self._open()
        sizes = [len(incoming.payload) for incoming in packed]
        largest = max(sizes)
        if largest > capacity_bytes:
            raise MessageTooLarge(
                f"a message of {largest} bytes can never fit topic {self._topic}, which holds {capacity_bytes}: "
                "raise queue.capacity_megabytes"
            )
        first = self._next
        self._outbox += packed
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((first, first + len(packed), accepted))
        self._unwritten_bytes += sum(sizes)
        if self._unwritten_bytes >= WRITE_BYTES:
            self._flush()
        else:
            self._flush_soon()
        await accepted

    async def close(self) -> None:
        """Wait until everything is accepted, then end the stream. Raises DeadlineExceeded when the queue is silent; the sender is
        closed all the same. Closing twice is harmless."""
        if self._closed is not None:
            return
        self._capacity_bytes = 0
        closed = self._closed = asyncio.get_running_loop().create_future()
        try:
            await self._open(closing=True)
            if self._outbox:
                accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append((self._next, self._next, accepted))
                await accepted
            self._ending = True
            self._say(["close", self._topic])
            await closed
        except StreamClosed:
            if self._outbox:
                raise  # else the topic has ended: this stream's end was heard before
        finally:
            self._shut(StreamClosed(f"this sender of topic {self._topic} is closed"))

    def abandon(self) -> None:
        """Stop without a word, as a killed process would; the queue notices when the lease ends."""
        self._shut(StreamClosed(f"this sender of topic {self._topic} was abandoned"))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _next(self) -> int:
        return self._handled + len(self._outbox)

    async def _open(self, *, closing: bool = False) -> int:
        if self._broken is not None:
            raise self._broken
        if self._closed is not None and not closing:
            raise StreamClosed(f"this sender of topic {self._topic} is closed")
        if self._link is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._link = Link(
                self._address,
                beat=self._beat,
                on_message=self._on_message,
                on_silence=self._fail_waits,
                heartbeat_seconds=self._heartbeat_seconds,
                silence_seconds=self._silence_seconds,
            )
        assert self._opened is not None
        if self._opened.done() and self._opened.exception() is not None:
            self._opened = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._opened)

    def _beat(self, beat: int) -> list[Any]:
        if self._ending:
            return ["close", self._topic]
        self._at_beat = (beat, self._announced, self._sent)
        return ["sender", self._topic, self._producer, beat]

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        self._unwritten_bytes = 0
        end = self._next
        if self._sent < self._granted:
            self._write(min(self._granted, end))
        if end == self._announced:
            return
        if self._sent == self._announced and not self._congested:
            self._write(self._eager_end(end))
            self._eager_to = self._announced = self._sent
        if end > self._announced:
            sizes = [len(incoming.payload) for incoming in self._numbers(self._announced, end)]
            self._say(["announce", self._topic, self._announced, sizes])
            self._announced = self._asked_to = end

    def _eager_end(self, end: int) -> int:
        """Up to which message number the eager write goes: EAGER_BYTES, or one message."""
        size = 0
        for number, incoming in enumerate(self._numbers(self._sent, end), self._sent):
            size += len(incoming.payload)
            if size > EAGER_BYTES and number > self._sent:
                return number
        return end

    def _write(self, end: int) -> None:
        message_ids, group_ids, payloads = zip(*self._numbers(self._sent, end), strict=True)
        self._say(["write", self._topic, self._sent, message_ids, group_ids], gathered(payloads))
        self._sent = end

    def _numbers(self, first: int, end: int) -> Iterator[Incoming]:
        """Messages number `first` … `end` − 1 of the outbox."""
        return islice(self._outbox, first - self._handled, end - self._handled)

    def _say(self, body: Sequence[Any], blocks: Blocks | None = None) -> None:
        if self._link is not None:
            self._link.send(body, blocks)

    def _on_message(self, kind: str, fields: list[Any], _payloads: list[memoryview]) -> None:
        if kind == "progress":
            self._on_progress(*fields)
        elif kind == "failed":
            self._on_failed(*fields)
        elif kind == "closed" and self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
        elif kind == "error" and fields[0] == UnknownSender.__name__:
            self._say(["sender", self._topic, self._producer, 0])  # a new broker, which read what was meant for another
        elif kind == "error":
            self._broken = error_of(*fields)
            self._capacity_bytes = 0
            self._fail_waits(self._broken)

    def _on_progress(self, beat: int, announced: int, granted: int, handled: int, capacity_bytes: int) -> None:
        assert self._opened is not None
        if handled >> LIFE_BITS != self._handled >> LIFE_BITS:
            self._begin_at(handled)
        if not self._opened.done():
            self._opened.set_result(capacity_bytes)
            self._capacity_bytes = 0 if self._closed else capacity_bytes
        for _ in range(min(handled, self._next) - self._handled):
            self._outbox.popleft()
            self._handled += 1
        self._granted = granted
        self._sent = max(self._sent, self._handled)
        if 0 < self._eager_to <= announced:
            if handled < self._eager_to:  # the broker took a part and holds the rest announced: to be written when granted
                self._sent = self._handled
                self._congested = True
            self._eager_to = 0
        if 0 < self._asked_to <= announced:
            self._congested = granted < self._asked_to
            self._asked_to = 0
        if beat == self._at_beat[0]:
            self._mend(announced)
        while self._waiting and self._waiting[0][1] <= self._handled:
            _, _, accepted = self._waiting.popleft()
            if not accepted.done():
                accepted.set_result(None)
        if self._sent < self._granted or self._next > self._announced:
            self._flush_soon()

    def _begin_at(self, number: int) -> None:
        """A broker of another life: the first message that was not handled has this number there, and nothing is announced."""
        shift = number - self._handled
        self._waiting = deque((first + shift, end + shift, accepted) for first, end, accepted in self._waiting)
        self._announced = self._granted = self._sent = self._handled = number
        self._eager_to = self._asked_to = 0
        self._at_beat = (0, number, number)
        if self._ending:
            self._say(["close", self._topic])

    def _mend(self, announced: int) -> None:
        """The broker has read everything that was written before the beat: what it does not count was lost on the way (or its
        lease had ended), and is said again."""
        _, announced_then, sent_then = self._at_beat
        if announced < announced_then:
            self._announced = max(announced, self._handled)
        if self._handled < sent_then:
            self._sent = self._handled
        self._sent = min(self._sent, self._announced)
        if announced < announced_then or self._handled < sent_then:
            self._congested = True
            self._eager_to = self._asked_to = 0

    def _on_failed(self, number: int, kind: str, text: str) -> None:
        for first, end, accepted in self._waiting:
            if first <= number < end and not accepted.done():
                accepted.set_exception(error_of(kind, text))

    def _fail_waits(self, error: TransportError) -> None:
        """Whoever waits hears of it; what was not accepted stays in line, should the queue speak again."""
        waits: list[asyncio.Future[Any] | None] = [self._opened, self._closed, *(future for _, _, future in self._waiting)]
        self._waiting.clear()
        for future in waits:
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting

    def _shut(self, error: TransportError) -> None:
        if self._broken is None:
            self._broken = error
        self._capacity_bytes = 0
        self._fail_waits(self._broken)
        if self._link is not None:
            self._link.close()
