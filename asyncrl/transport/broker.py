"""The broker: an Exchange behind a ROUTER socket, on the event loop of the message_queue process.

    senders ──announce, write──▶ ROUTER ──▶ Exchange ──▶ deliver ──▶ receivers that asked, in the order they asked
            ◀──────progress─────

One wake-up reads everything that waits, then serves once: `on_accept` for all that was accepted, deliveries, grants, and one
`progress` per sender whose counts moved. Frames that are no message of ours are counted by their error's name and answered with
it; the broker lives on. Only an exception of a hook ends it (`watch`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import zmq

from asyncrl.clock import Clock
from asyncrl.errors import FrameError, MalformedFrame, OversizedFrame, TransportError
from asyncrl.transport.allocator import keep_freed_memory
from asyncrl.transport.blocks import Blocks, forwarded
from asyncrl.transport.exchange import Exchange
from asyncrl.transport.loop_socket import Frames, LoopSocket, bind_socket, open_socket
from asyncrl.transport.records import LIFE_BITS, Progress, Session
from asyncrl.transport.wire import MAX_BODY_BYTES, read_from_client, write_frames

DELIVERY_BYTES = 32 * 10**6  # most of one delivery, unless a single message is larger
_GOODBYE_SECONDS = 1.0
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Receiver:
    """A consumer's side of the conversation. `unconfirmed`: (delivery, message ids) not yet known to have arrived."""

    topic: str
    delivery: int
    consumer: str = ""
    request: int = 0
    open: bool = False
    max_items: int = 0
    unconfirmed: deque[tuple[int, list[str]]] = field(default_factory=deque)


class Broker:
    """Moves messages between senders, the exchange and receivers. Use `broker.exchange` for settle, unsettled and stats."""

    def __init__(self, exchange: Exchange, *, clock: Clock, bind: str = "tcp://127.0.0.1:*", life: int = 0):
        """`life`: a number that no other broker had to which this one's clients may have spoken (`records.LIFE_BITS`)."""
        self.exchange = exchange
        self._clock = clock
        self._life = life
        for each in exchange.topics.values():
            each.first_number = life << LIFE_BITS
        self._bind = bind
        self._socket: LoopSocket | None = None
        self._max_bytes = max(topic.spec.capacity_bytes for topic in exchange.topics.values()) + MAX_BODY_BYTES
        self._senders: dict[Session, tuple[str, Progress | None]] = {}  # topic, and the counts last told
        self._stirred: dict[Session, int] = {}  # senders to be told their counts at the end of this wake-up → beat
        self._receivers: dict[Session, _Receiver] = {}
        self._consumers: dict[tuple[str, str], Session] = {}  # (topic, name) → its newest session
        self._asking: dict[str, deque[Session]] = {name: deque() for name in exchange.topics}
        self._refused: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._serve_due: asyncio.Handle | None = None
        self._serving = False
        self._failed: asyncio.Future[NoReturn] | None = None
        self._handlers: dict[str, Callable[..., None]] = {
            "sender": self._sender, "announce": self._announce, "write": self._write, "close": self._close_sender,
            "receiver": self._receiver, "take": self._take, "cancel": self._cancel, "lost": self._lost,
            "settle": self._settle, "refuse": self._refuse, "leave": self._leave,
        }  # fmt: skip

    async def start(self, bind: str | None = None) -> str:
        """Bind, here or where the constructor said, and serve on the running loop; returns the address for `QueueSender` and
        `QueueReceiver`."""
        assert self._socket is None, "a broker starts once"
        socket = open_socket(zmq.ROUTER, max_frame_bytes=self._max_bytes)
        try:
            address = await bind_socket(socket, bind or self._bind)
        except zmq.ZMQError:
            socket.close()
            raise
        self._failed = asyncio.get_running_loop().create_future()
        keep_freed_memory()
        self._socket = LoopSocket(socket, self._on_batch, copied_parts=2)  # a peer's id and what it says; then come blocks
        self.exchange.wake = self.poke
        self._expire_later()
        return address

    async def close(self) -> None:
        """Stop serving. What is unsettled stays in the exchange. Closing twice is harmless."""
        self.exchange.wake = lambda: None
        for handle in (self._timer, self._serve_due):
            if handle is not None:
                handle.cancel()
        if self._failed is not None:
            self._failed.cancel()
        if self._socket is not None:
            self._socket.close(linger_seconds=_GOODBYE_SECONDS)

    def poke(self) -> None:
        """Serve soon: a settlement outside a wake-up may have freed capacity. The exchange calls it by itself."""
        if self._serve_due is None and not self._serving and self._socket is not None and not self._socket.closed:
            self._serve_due = asyncio.get_running_loop().call_soon(self._guard, self._serve)

    async def watch(self) -> NoReturn:
        """Wait for a hook to raise, and raise that; the broker has stopped then. Never returns otherwise."""
        assert self._failed is not None, "watch a broker that was started"
        await asyncio.shield(self._failed)
        raise AssertionError("a hook's failure is an exception")

    def stats(self) -> dict[str, dict[str, float]]:
        """`Exchange.stats` at this moment, plus "frames": refused frames of peers, by their error's name."""
        return {**self.exchange.stats(self._clock.now()), "frames": dict(self._refused)}

    # ── a wake-up ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_batch(self, batch: list[Frames]) -> None:
        self._guard(self._read, batch)

    def _guard(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:  # the boundary to the hooks: what the queue's owner raises is the owner's to hear
            log.exception("the queue stops: a hook raised")
            assert self._failed is not None
            if not self._failed.done():
                self._failed.set_exception(error)
            if self._socket is not None:
                self._socket.close()

    def _read(self, batch: list[Frames]) -> None:
        self._serving = True
        for peer, *frames in batch:
            try:
                if sum(map(len, frames)) > self._max_bytes:
                    raise OversizedFrame(f"more than {self._max_bytes} bytes in one message")
                kind, (topic, *fields), payloads = read_from_client(frames)
                self.exchange.topic(topic)
                self._handlers[kind](peer, topic, *fields, *((payloads,) if kind == "write" else ()))
            except (FrameError, TransportError) as error:
                self._refused[type(error).__name__] += 1
                self._send(peer, ["error", type(error).__name__, str(error)])
        self._serve()

    def _serve(self) -> None:
        if self._serve_due is not None:
            self._serve_due.cancel()
            self._serve_due = None
        self._serving = True
        now = self._clock.now()
        self.exchange.publish()
        for name in self._asking:
            self._deliver(name, now)
            for session in self.exchange.topics[name].grant(now):
                self._stirred.setdefault(session, 0)
        self._serving = False
        for session, beat in self._stirred.items():
            self._tell(session, beat)
        self._stirred.clear()

    def _deliver(self, name: str, now: float) -> None:
        topic, asking = self.exchange.topics[name], self._asking[name]
        while asking and (topic.num_takeable or topic.drained):
            session = asking.popleft()
            receiver = self._receivers[session]
            receiver.open = False
            if topic.drained:
                self._send(session, ["end", receiver.request])
                continue
            stored = self.exchange.take(name, session, max_items=receiver.max_items, max_bytes=DELIVERY_BYTES, now=now)
            receiver.delivery += 1
            message_ids = [each.message_id for each in stored]
            receiver.unconfirmed.append((receiver.delivery, message_ids))
            num_redelivered = sum([each.redelivered for each in stored])
            body = ["deliver", receiver.delivery, receiver.request, num_redelivered, message_ids]
            self._send(session, body, forwarded([each.payload for each in stored]))

    def _tell(self, session: Session, beat: int) -> None:
        name, told = self._senders[session]
        topic = self.exchange.topics[name]
        progress = topic.progress(session)
        if progress is not None and (beat or progress != told):
            self._senders[session] = (name, progress)
            self._send(session, ["progress", beat, *progress, topic.spec.capacity_bytes])

    def _expire_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.exchange.lease_seconds / 10, self._guard, self._expire)

    def _expire(self) -> None:
        now = self._clock.now()
        for name, topic in self.exchange.topics.items():
            for session in topic.expire(now):
                log.warning("topic %s: a peer is silent, its leases and credits return", name)
                if (receiver := self._receivers.get(session)) is not None:
                    self._forget_request(session, receiver)
                    receiver.unconfirmed.clear()
        self._serve()
        self._expire_later()

    def _send(self, peer: Session, body: Sequence[Any], blocks: Blocks | None = None) -> None:
        if self._socket is not None and not self._socket.closed:
            self._socket.send([peer, *write_frames(body, blocks)])

    # ── what senders say ─────────────────────────────────────────────────────────────────────────────────────────────

    def _sender(self, peer: bytes, topic: str, producer: str, beat: int) -> None:
        if self._senders.setdefault(peer, (topic, None))[0] != topic:
            raise MalformedFrame(f"this sender belongs to another topic than {topic}")
        self.exchange.open_sender(topic, peer, producer, self._clock.now())
        self._stirred[peer] = beat

    def _announce(self, peer: bytes, topic: str, first: int, sizes: list[int]) -> None:
        self.exchange.topics[topic].announce(peer, first, sizes, self._clock.now())
        self._stirred.setdefault(peer, 0)

    def _write(
        self, peer: bytes, topic: str, first: int, ids: list[str], group_ids: list[str], payloads: list[memoryview]
    ) -> None:
        now = self._clock.now()
        of = self.exchange.topics[topic]
        of.announce(peer, first, list(map(len, payloads)), now)
        for session in of.grant(now):
            self._stirred.setdefault(session, 0)
        result = self.exchange.accept(topic, peer, first, list(zip(ids, group_ids, payloads, strict=True)), now)
        for number, reason in result.refused:
            self._refused["MalformedFrame"] += 1
            self._send(peer, ["failed", number, "MalformedFrame", reason])
        self._stirred.setdefault(peer, 0)

    def _close_sender(self, peer: bytes, topic: str) -> None:
        self.exchange.close_sender(topic, peer, self._clock.now())
        self.exchange.publish()
        self._send(peer, ["closed"])

    # ── what receivers say ───────────────────────────────────────────────────────────────────────────────────────────

    def _known(self, peer: bytes, topic: str) -> _Receiver:
        self.exchange.topics[topic].touch_consumer(peer, self._clock.now())
        receiver = self._receivers.get(peer)
        if receiver is None:
            receiver = self._receivers[peer] = _Receiver(topic, self._life << LIFE_BITS)
        if receiver.topic != topic:
            raise MalformedFrame(f"this receiver takes from {receiver.topic}, not from {topic}")
        return receiver

    def _receiver(self, peer: bytes, topic: str, consumer: str, beat: int) -> None:
        receiver = self._known(peer, topic)
        if consumer and receiver.consumer != consumer:
            receiver.consumer = consumer
            self._take_over(peer, topic, consumer)
        self._send(peer, ["beat", beat, receiver.request if receiver.open else 0, receiver.delivery])

    def _take(self, peer: bytes, topic: str, request: int, max_items: int, received: int) -> None:
        receiver = self._known(peer, topic)
        while receiver.unconfirmed and receiver.unconfirmed[0][0] <= received and self._of_this_life(received):
            receiver.unconfirmed.popleft()
        if request > receiver.request and max_items > 0:
            if not receiver.open:
                self._asking[topic].append(peer)
            receiver.request, receiver.max_items, receiver.open = request, max_items, True

    def _cancel(self, peer: bytes, topic: str, request: int) -> None:
        receiver = self._known(peer, topic)
        self.exchange.publish()
        self._deliver(topic, self._clock.now())
        if receiver.open and receiver.request == request:
            self._forget_request(peer, receiver)
            receiver.delivery += 1
            self._send(peer, ["deliver", receiver.delivery, request, 0, []], forwarded([]))

    def _lost(self, peer: bytes, topic: str, received: int) -> None:
        receiver = self._known(peer, topic)
        if not self._of_this_life(received):
            return
        while receiver.unconfirmed and receiver.unconfirmed[-1][0] > received:
            self.exchange.topics[topic].give_back(peer, receiver.unconfirmed.pop()[1])
        receiver.delivery = received

    def _settle(self, peer: bytes, topic: str, message_ids: list[str]) -> None:
        self._known(peer, topic)
        self.exchange.settle(topic, message_ids)

    def _refuse(self, peer: bytes, topic: str, message_id: str, reason: str) -> None:
        self._known(peer, topic)
        self._refused["payload"] += 1
        self.exchange.refuse(topic, message_id, reason)

    def _leave(self, peer: bytes, topic: str) -> None:
        receiver = self._receivers.pop(peer, None)
        if receiver is not None:
            self._forget_request(peer, receiver)
        self.exchange.topics[topic].close_consumer(peer)
        self._send(peer, ["left"])

    def _of_this_life(self, number: int) -> bool:
        return number >> LIFE_BITS == self._life

    def _take_over(self, peer: bytes, topic: str, consumer: str) -> None:
        """A newer receiver of this name is there: the one before is dead, or told that it is one too many."""
        before = self._consumers.get((topic, consumer))
        self._consumers[topic, consumer] = peer
        if before is None or (receiver := self._receivers.pop(before, None)) is None:
            return
        self._forget_request(before, receiver)
        self.exchange.topics[topic].close_consumer(before)
        self._send(before, ["error", "StreamClosed", f"topic {topic}: a newer receiver named {consumer} has taken over"])

    def _forget_request(self, peer: bytes, receiver: _Receiver) -> None:
        if receiver.open:
            receiver.open = False
            self._asking[receiver.topic].remove(peer)
