"""The queue without sockets, for one event loop: the same Exchange and Topic, the same payload bytes, asyncio waits only.

A wake-up (`_turn`) grants, accepts and delivers until nothing moves; it is synchronous, so the bound holds between any two
awaits. Works on a virtual-time loop: time is read from the clock, and the one timer is the lease of what was abandoned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.clock import Clock
from asyncrl.errors import FrameError, MessageTooLarge, StreamClosed
from asyncrl.protocols.queue import Delivery, Message
from asyncrl.transport.envelopes import pack, unpack
from asyncrl.transport.exchange import Exchange, Taken
from asyncrl.transport.records import Incoming, Session

if TYPE_CHECKING:
    from asyncrl.transport.topic import Topic

DELIVERY_BYTES = 32 * 10**6


class LocalQueue:
    """Moves messages between senders and receivers of one loop. Use `queue.exchange` for settle, unsettled and stats."""

    def __init__(self, exchange: Exchange, *, clock: Clock):
        self.exchange = exchange
        self.clock = clock
        self._sessions = 0
        self._senders: dict[Session, LocalSender] = {}
        self._alive: dict[Session, str] = {}  # receivers that heartbeat, as it were → topic
        self._asking: dict[str, deque[LocalReceiver]] = {name: deque() for name in exchange.topics}
        self._turning = False
        exchange.wake = self._turn

    def sender(self, topic: str, *, producer: str) -> LocalSender:
        """A producer of `topic` under a name that the topic was told of. Raises as `Topic.open_sender`."""
        session = self._new_session()
        self.exchange.topic(topic).open_sender(session, producer, self.clock.now())
        for older in self._senders.values():
            older._superseded_by(topic, producer)
        sender = self._senders[session] = LocalSender(self, topic, session, producer)
        return sender

    def receiver(self, topic: str) -> LocalReceiver:
        """A consumer of `topic`."""
        self.exchange.topic(topic)
        session = self._new_session()
        self._alive[session] = topic
        return LocalReceiver(self, topic, session)

    def stats(self) -> dict[str, dict[str, float]]:
        return self.exchange.stats(self.clock.now())

    # ── for the two ends ─────────────────────────────────────────────────────────────────────────────────────────────

    def _new_session(self) -> Session:
        self._sessions += 1
        return self._sessions.to_bytes(8, "big")

    def _turn(self) -> None:
        """Grant, accept and deliver until nothing moves."""
        if self._turning:
            return
        self._turning = True
        try:
            moved = True
            while moved:
                moved = sum(self._move(name, topic) for name, topic in self.exchange.topics.items()) > 0
        finally:
            self._turning = False

    def _move(self, name: str, topic: Topic) -> bool:
        now = self.clock.now()
        granted = topic.grant(now)
        for session in granted:
            self._senders[session]._write(now)
        self.exchange.publish()
        asking = self._asking[name]
        moved = bool(granted)
        while asking and (topic.num_takeable or topic.drained):
            asking.popleft()._serve(now)
            moved = True
        return moved

    def _abandoned(self, session: Session) -> None:
        """Nobody speaks for this session any more: its lease ends when it has been silent for lease_seconds."""
        self._alive.pop(session, None)
        asyncio.get_running_loop().call_later(self.exchange.lease_seconds * 1.001, self._expire)

    def _expire(self) -> None:
        now = self.clock.now()
        for session, topic in self._alive.items():
            self.exchange.topics[topic].touch_consumer(session, now)
        for sender in self._senders.values():
            sender._touch(now)
        for topic_state in self.exchange.topics.values():
            topic_state.expire(now)
        self._turn()


class LocalSender:
    """`protocols.queue.Sender` on a LocalQueue."""

    def __init__(self, queue: LocalQueue, topic: str, session: Session, producer: str):
        self._queue, self._topic, self._session, self._producer = queue, topic, session, producer
        self._state = queue.exchange.topic(topic)
        self._outbox: deque[Incoming] = deque()
        self._handled = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # (number after the last message, future)
        self._over: StreamClosed | None = None

    async def send(self, messages: Sequence[Message]) -> None:
        """Return when every message is accepted. Raises MessageTooLarge, MalformedFrame, StreamClosed."""
        await asyncio.sleep(0)  # others get their turn even when nothing ever waits
        packed = [pack(message) for message in messages]
        if self._over is not None:
            raise self._over
        capacity_bytes = self._state.spec.capacity_bytes
        for incoming in packed:
            if len(incoming.payload) > capacity_bytes:
                raise MessageTooLarge(
                    f"{incoming.message_id} has {len(incoming.payload)} bytes and can never fit topic {self._topic}, "
                    f"which holds {capacity_bytes}: raise queue.capacity_megabytes"
                )
        if packed:
            first = self._handled + len(self._outbox)
            sizes = [len(incoming.payload) for incoming in packed]
            self._state.announce(self._session, first, sizes, self._queue.clock.now())
            self._outbox.extend(packed)
            await self._accepted()

    async def close(self) -> None:
        """Wait until everything is accepted, then end the stream. Closing twice is harmless."""
        if self._over is None:
            await self._accepted()
            self._state.close_sender(self._session, self._queue.clock.now())
            self._over = StreamClosed(f"this sender of topic {self._topic} is closed")
            self._queue._turn()

    def abandon(self) -> None:
        """Stop without a word, as a killed process would; the queue notices when the lease ends."""
        self._end(StreamClosed(f"this sender of topic {self._topic} was abandoned"))
        self._queue._abandoned(self._session)

    def _superseded_by(self, topic: str, producer: str) -> None:
        if self._over is None and (topic, producer) == (self._topic, self._producer):
            self._end(StreamClosed(f"topic {topic}: a newer sender named {producer} has taken over"))

    def _end(self, error: StreamClosed) -> None:
        self._over = error
        while self._waiting:
            _, accepted = self._waiting.popleft()
            if not accepted.done():
                accepted.set_exception(error)

    async def _accepted(self) -> None:
        """Until everything in the outbox at this moment is accepted."""
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._handled + len(self._outbox), accepted))
        self._queue._turn()
        self._wake()
        await accepted

    def _write(self, now: float) -> None:
        if self._over is not None:
            return
        progress = self._state.progress(self._session)
        assert progress is not None, "a local sender is known to its topic"
        batch = [self._outbox.popleft() for _ in range(progress.granted - progress.handled)]
        self._queue.exchange.accept(self._topic, self._session, progress.handled, batch, now)
        self._handled = progress.granted
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._handled:
            _, accepted = self._waiting.popleft()
            if not accepted.done():
                accepted.set_result(None)

    def _touch(self, now: float) -> None:
        if self._over is None:
            self._state.announce(self._session, self._handled, (), now)


class LocalReceiver:
    """`protocols.queue.Receiver` on a LocalQueue; one `receive` at a time."""

    def __init__(self, queue: LocalQueue, topic: str, session: Session):
        self._queue, self._topic, self._session = queue, topic, session
        self._state = queue.exchange.topic(topic)
        self._max_items = 0
        self._answer: asyncio.Future[None] | None = None
        self._inbox: list[Delivery] = []
        self._closed = False
        self.refused = 0

    async def receive(self, *, max_items: int, timeout: float) -> list[Delivery]:
        """Take up to `max_items`: at once what is there, else the first to come; [] when `timeout` seconds pass. Raises
        StreamClosed at the end of the stream or after `close`."""
        assert max_items >= 1, "receive takes at least one item"
        await asyncio.sleep(0)  # others get their turn even when there is always something to take
        asking = self._queue._asking[self._topic]
        self._max_items = max_items
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not self._inbox:
            if self._closed:
                raise StreamClosed(f"this receiver of topic {self._topic} is closed")
            if self._state.drained:
                raise StreamClosed(f"topic {self._topic} has ended")
            self._answer = loop.create_future()
            asking.append(self)
            self._queue._turn()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._answer
            except TimeoutError:
                break
            finally:
                if self in asking:
                    asking.remove(self)
        taken, self._inbox = self._inbox[:max_items], self._inbox[max_items:]
        return taken

    async def settle(self, ids: Sequence[str]) -> None:
        """These messages are done with."""
        self._queue.exchange.settle(self._topic, ids)

    async def close(self) -> None:
        """Give the leases back."""
        self._end()
        self._queue._alive.pop(self._session, None)
        self._state.close_consumer(self._session)
        self._queue._turn()

    def abandon(self) -> None:
        """Stop without a word, as a killed process would; the queue notices when the lease ends."""
        self._end()
        self._state.touch_consumer(self._session, self._queue.clock.now())
        self._queue._abandoned(self._session)

    def _end(self) -> None:
        self._closed = True
        self._inbox.clear()
        asking = self._queue._asking[self._topic]
        if self in asking:
            asking.remove(self)
        self._answered()

    def _serve(self, now: float) -> None:
        """The queue has something to take, or the topic is drained."""
        stored = self._queue.exchange.take(
            self._topic, self._session, max_items=self._max_items, max_bytes=DELIVERY_BYTES, now=now
        )
        self._inbox.extend(delivery for each in stored if (delivery := self._opened(each)) is not None)
        self._answered()

    def _opened(self, stored: Taken) -> Delivery | None:
        try:
            return Delivery(unpack(stored.message_id, stored.payload), stored.redelivered)
        except FrameError as error:
            self.refused += 1
            self._queue.exchange.refuse(self._topic, stored.message_id, f"{type(error).__name__}: {error}")
            return None

    def _answered(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)
