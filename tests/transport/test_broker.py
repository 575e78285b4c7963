"""The broker and its clients when something is wrong: garbage, lost frames, bad payloads, a raising hook, silence."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.clock import SystemClock
from asyncrl.errors import DeadlineExceeded, FrameError, LedgerError, StreamClosed, TransportError
from asyncrl.transport.blocks import BLOCK_BYTES, Blocks, gathered
from asyncrl.transport.broker import Broker
from asyncrl.transport.client import QueueReceiver, QueueSender
from asyncrl.transport.envelopes import pack
from asyncrl.transport.exchange import Exchange, NoHooks
from asyncrl.transport.loop_socket import LoopSocket
from asyncrl.transport.wire import read_from_broker, read_from_client, write_frames
from tests.messages.samples import plain_values, trajectory
from tests.transport.queues import TIMEOUT, topic
from tests.waiting import until


class Site:
    """A broker, its address, and clients that are closed with it."""

    def __init__(self, hooks=None, *, items: int = 64, size: int = 10**6, producers=("rollouter", "raw")):
        self.exchange = Exchange([topic(items=items, size=size, producers=producers)], lease_seconds=5.0, hooks=hooks)
        self.broker = Broker(self.exchange, clock=SystemClock())
        self.address = ""
        self.ends: list[Any] = []

    async def __aenter__(self) -> Site:
        self.address = await self.broker.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for end in self.ends:
            end.abandon()
        await self.broker.close()

    def sender(self) -> QueueSender:
        sender = QueueSender(self.address, "rollouts", producer="rollouter", heartbeat_seconds=0.05, silence_seconds=5)
        self.ends.append(sender)
        return sender

    def receiver(self) -> QueueReceiver:
        receiver = QueueReceiver(self.address, "rollouts", heartbeat_seconds=0.05, silence_seconds=5)
        self.ends.append(receiver)
        return receiver


class RawPeer:
    """A DEALER that says whatever it likes."""

    def __init__(self, address: str):
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.connect(address)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    async def say(self, *frames: bytes) -> None:
        await asyncio.to_thread(self._socket.send_multipart, frames)

    async def hear(self) -> tuple[str, list[Any]]:
        kind, fields, _ = read_from_broker(await asyncio.to_thread(self._socket.recv_multipart))
        return kind, fields


def write_of(ids: list[str], payloads: list[bytes]) -> list[bytes]:
    return write_frames(["write", "rollouts", 0, ids, [name.rpartition("/")[0] for name in ids]], gathered(payloads))


GARBAGE = [
    ([b""], "MalformedFrame"),
    ([b"\xc1"], "MalformedFrame"),
    ([b"x" * 2000], "MalformedFrame"),
    (write_frames(["dance", "rollouts"]), "UnknownTag"),
    (write_frames(["take", "rollouts", 1, 1]), "MalformedFrame"),
    (write_frames(["take", "rollouts", -1, 1, 0]), "MalformedFrame"),
    ([*write_frames(["take", "rollouts", 1, 1, 0]), b"more"], "MalformedFrame"),
    (write_frames(["take", "nowhere", 1, 1, 0]), "TransportError"),
    (write_frames(["sender", "rollouts", "eve", 1]), "TransportError"),
    (write_frames(["announce", "rollouts", 0, [10]]), "UnknownSender"),
    (write_frames(["close", "rollouts"]), "UnknownSender"),
    (write_of(["0/0/0/0"], [b"x"]), "UnknownSender"),
    (write_of(["0/0/0/0"], [b"x"])[:1], "MalformedFrame"),
    ([*write_of(["0/0/0/0"], [b"x"]), b"more"], "MalformedFrame"),
    ([write_of(["a"], [b"xx"])[0], b"x"], "TruncatedFrame"),
    (write_of(["a", "b"], [b"x"]), "MalformedFrame"),
    (write_of(["a" * 300], [b"x"]), "MalformedFrame"),
    (
        write_frames(["write", "rollouts", 0, ["a"] * 2, ["g"] * 2], Blocks([[1, BLOCK_BYTES]], [b"x" * (1 + BLOCK_BYTES)])),
        "OversizedFrame",
    ),
    (write_frames(["write", "rollouts", 0, ["a"] * 2, ["g"]], gathered([b"x"] * 2)), "MalformedFrame"),
    (write_frames(["write", "rollouts", 0, ["a"], ["g"]], Blocks([[-1, 2]], [b"x"])), "MalformedFrame"),
    ([b"x" * 66_000_000], "OversizedFrame"),
]


@pytest.mark.parametrize(("frames", "error"), GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_is_refused_by_name_and_counted_and_the_queue_goes_on(frames, error):
    async with Site() as site:
        with RawPeer(site.address) as raw:
            await raw.say(*frames)
            kind, fields = await raw.hear()
            assert (kind, fields[0]) == ("error", error)
        assert site.broker.stats()["frames"] == {error: 1}
        await site.sender().send([trajectory(0)])
        assert len(await site.receiver().receive(max_items=1, timeout=TIMEOUT)) == 1


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=plain_values | st.binary(max_size=50), more=st.lists(st.binary(max_size=20), max_size=2), packed=st.booleans())
def test_random_control_frames_only_ever_raise_a_frame_error(body, more, packed):
    first = msgpack.packb(body, unicode_errors="surrogatepass") if packed or not isinstance(body, bytes) else body
    for read in (read_from_client, read_from_broker):
        with pytest.raises(FrameError):
            read([first, *more])


async def test_an_undecodable_payload_is_settled_counted_and_reported_and_the_consumer_goes_on():
    refused = []

    class Hooks(NoHooks):
        def on_refused(self, topic, message_id, group_id, reason):
            refused.append((topic, message_id, group_id, reason))

    async with Site(Hooks()) as site:
        with RawPeer(site.address) as raw:
            await raw.say(*write_frames(["sender", "rollouts", "raw", 1]))
            await raw.say(*write_of(["0/3/0/1"], [b"not a message"]))
            await until(lambda: site.broker.stats()["rollouts"]["accepted"] == 1)
        await site.sender().send([trajectory(4)])
        receiver = site.receiver()
        received = []
        while not received:
            received = await receiver.receive(max_items=10, timeout=TIMEOUT)
        assert [delivery.message.id.row for delivery in received] == [4]
        await until(lambda: bool(refused))
        [(name, message_id, group_id, reason)] = refused
        assert (name, message_id, group_id) == ("rollouts", "0/3/0/1", "0/3/0")
        assert "Frame" in reason
        assert receiver.refused == 1
        stats = site.broker.stats()
        assert stats["rollouts"]["refused"] == 1
        assert stats["frames"] == {"payload": 1}
        assert [each.message_id for each in site.exchange.unsettled("rollouts")] == ["0/4/0/0"]


async def test_a_payload_under_anothers_name_is_refused():
    async with Site() as site:
        payload = pack(trajectory(5)).payload
        with RawPeer(site.address) as raw:
            await raw.say(*write_frames(["sender", "rollouts", "raw", 1]))
            await raw.say(*write_of(["0/6/0/0"], [payload]))
            await until(lambda: site.broker.stats()["rollouts"]["accepted"] == 1)
        receiver = site.receiver()
        assert await receiver.receive(max_items=1, timeout=0.5) == []
        assert receiver.refused == 1


async def test_a_write_beyond_the_capacity_is_not_held():
    """A sender that ignores credits gains nothing: what does not fit stays with it."""
    async with Site(items=2) as site:
        with RawPeer(site.address) as raw:
            await raw.say(*write_frames(["sender", "rollouts", "raw", 1]))
            await raw.say(*write_of([f"m{n}" for n in range(5)], [b"x"] * 5))
            await until(lambda: site.broker.stats()["rollouts"]["accepted"] == 2)
            stats = site.broker.stats()["rollouts"]
            assert (stats["depth"], stats["waiting"], stats["max_depth"]) == (2, 3, 2)


async def test_a_hook_that_raises_ends_the_broker_and_the_owner_hears_it():
    class Hooks(NoHooks):
        def on_accept(self, topic, accepted):
            raise LedgerError("the disk is full")

    async with Site(Hooks()) as site:
        sending = asyncio.create_task(site.sender().send([trajectory(0)]))
        with pytest.raises(LedgerError, match="disk is full"):
            await asyncio.wait_for(site.broker.watch(), TIMEOUT)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_silent_queue_raises_deadline_exceeded_at_both_ends():
    address = "tcp://127.0.0.1:9"
    sender = QueueSender(address, "rollouts", producer="rollouter", heartbeat_seconds=0.05, silence_seconds=0.2)
    receiver = QueueReceiver(address, "rollouts", heartbeat_seconds=0.05, silence_seconds=0.2)
    with pytest.raises(DeadlineExceeded, match="message_queue"):
        await sender.send([trajectory(0)])
    with pytest.raises(DeadlineExceeded):
        await receiver.receive(max_items=1, timeout=TIMEOUT)
    with pytest.raises(DeadlineExceeded):
        await sender.close()
    with pytest.raises(DeadlineExceeded):
        await receiver.close()


async def test_an_unexpected_producer_is_told_who_was_expected():
    async with Site() as site:
        sender = QueueSender(site.address, "rollouts", producer="eve")
        site.ends.append(sender)
        with pytest.raises(TransportError, match="was told of rollouter, raw"):
            await sender.send([trajectory(0)])


async def test_a_sender_whose_name_is_taken_over_is_told_so():
    async with Site() as site:
        old, new = site.sender(), site.sender()
        await old.send([trajectory(0)])
        await new.send([trajectory(1)])
        with pytest.raises(StreamClosed, match="taken over"):
            await old.send([trajectory(2)])


class Lossy:
    """Drops the frames that a predicate picks, between a client and ZeroMQ, as a broken connection would."""

    def __init__(self, monkeypatch, picks):
        original = LoopSocket.send
        self.dropped = 0

        def send(socket, frames):
            frames = list(frames)
            from_broker = len(frames) > 1 and frames[0][:1] == b"\x01"  # a client's routing id
            reader, own = (read_from_broker, frames[1:]) if from_broker else (read_from_client, frames)
            if picks(*reader(own)[:2]):
                self.dropped += 1
            else:
                original(socket, frames)

        monkeypatch.setattr(LoopSocket, "send", send)


FROM_SENDER, TO_SENDER = ["sender", "announce", "write", "close"], ["progress", "closed"]
FROM_RECEIVER, TO_RECEIVER = ["receiver", "take", "cancel", "leave"], ["deliver", "beat", "end", "left"]


@pytest.mark.parametrize("kind", FROM_SENDER + TO_SENDER + FROM_RECEIVER + TO_RECEIVER)
async def test_every_kind_of_frame_may_be_lost_and_nothing_is(monkeypatch, kind):
    """Every third frame of one kind vanishes; all messages arrive all the same, each producer's first deliveries in order."""
    seen = 0

    def every_third(this, _fields):
        nonlocal seen
        seen += this == kind
        return this == kind and seen % 3 == 1

    lossy = Lossy(monkeypatch, every_third)
    async with Site(items=4, producers=("rollouter",)) as site:
        sender, receiver = site.sender(), site.receiver()

        async def produce():
            for first in range(0, 24, 6):
                await sender.send([trajectory(row) for row in range(first, first + 6)])

        assert await receiver.receive(max_items=2, timeout=0.05) == []
        producing = asyncio.create_task(produce())
        rows = []
        while len(set(rows)) < 24:
            rows += [delivery.message.id.row for delivery in await receiver.receive(max_items=2, timeout=0.1)]
        await asyncio.wait_for(producing, TIMEOUT)
        await asyncio.wait_for(sender.close(), TIMEOUT)
        with pytest.raises(StreamClosed):
            await receiver.receive(max_items=2, timeout=TIMEOUT)
        await asyncio.wait_for(receiver.close(), TIMEOUT)
        assert list(dict.fromkeys(rows)) == list(range(24))
        assert lossy.dropped > 0
        assert site.broker.stats()["rollouts"]["max_depth"] <= 4
