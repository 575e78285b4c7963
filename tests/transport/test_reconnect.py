"""A broker that is started anew at the same address: senders and receivers go on by themselves, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.clock import SystemClock
from asyncrl.errors import DeadlineExceeded, StreamClosed
from asyncrl.ledger.store import FILE_NAME, LedgerWriter
from asyncrl.transport.broker import Broker
from asyncrl.transport.client import QueueReceiver, QueueSender
from asyncrl.transport.exchange import Exchange, NoHooks
from asyncrl.transport.journal import SegmentJournal
from asyncrl.transport.journal.segments import Segments
from tests.messages.samples import trajectory
from tests.transport.queues import TIMEOUT, topic

BEAT = 0.05


class Keeping(NoHooks):
    def __init__(self, writer):
        self.writer = writer

    def commit(self):
        self.writer.flush()

    def on_streams(self, topic, closed):
        self.writer.close_streams(topic, closed)


class DurableSite:
    """One broker after the other, at one address, over the same files."""

    def __init__(self, folder, *, items=64):
        self.folder, self.items = folder, items
        self.address = "tcp://127.0.0.1:*"
        self.lives = itertools.count(1)
        self.ends = []

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *exc):
        for end in self.ends:
            end.abandon()
        await self.crash()

    async def start(self):
        self.writer = LedgerWriter(self.folder / FILE_NAME)
        self.journal = SegmentJournal(Segments(self.folder / "journal", power=False), self.writer.journal)
        self.journal.open()
        hooks = Keeping(self.writer)
        self.exchange = Exchange([topic(items=self.items)], lease_seconds=30, hooks=hooks, journal=self.journal)
        self.exchange.restore(self.journal.recover(lambda topic, group: "deliver"))
        for name, producers in self.writer.closed_streams().items():
            self.exchange.topic(name).restore_closed(producers)
        self.broker = Broker(self.exchange, clock=SystemClock(), bind=self.address, life=next(self.lives))
        async with asyncio.timeout(TIMEOUT):
            while True:
                try:
                    self.address = await self.broker.start()
                    return
                except zmq.ZMQError:  # ZeroMQ's own thread has yet to let go of the port
                    await asyncio.sleep(0.01)

    async def crash(self):
        """Without a word, and without what was not written."""
        self.broker._socket.close()
        await self.broker.close()
        self.writer.abandon()
        self.journal.close()

    async def restart(self):
        await self.crash()
        await self.start()

    def sender(self, **options):
        options = {"heartbeat_seconds": BEAT, "silence_seconds": 20, **options}
        self.ends.append(QueueSender(self.address, "rollouts", producer="rollouter", **options))
        return self.ends[-1]

    def receiver(self, **options):
        options = {"heartbeat_seconds": BEAT, "silence_seconds": 20, **options}
        self.ends.append(QueueReceiver(self.address, "rollouts", **options))
        return self.ends[-1]


async def take(receiver, rows):
    """Rows in the order in which they come first, until all of `rows` have come."""
    seen = []
    async with asyncio.timeout(TIMEOUT):
        while not set(rows) <= set(seen):
            for delivery in await receiver.receive(max_items=10, timeout=TIMEOUT):
                if delivery.message.id.row not in seen:
                    seen.append(delivery.message.id.row)
                await receiver.settle([str(delivery.message.id)])
    return seen


async def sent(sender, message):
    """Until the queue that was silent speaks again."""
    while True:
        try:
            return await sender.send([message])
        except DeadlineExceeded:
            continue


async def test_a_receiver_that_waits_and_a_sender_that_waits_go_on(tmp_path):
    async with DurableSite(tmp_path, items=2) as site:
        sender, receiver = site.sender(), site.receiver()
        assert await receiver.receive(max_items=1, timeout=0.1) == []
        waiting = asyncio.ensure_future(receiver.receive(max_items=1, timeout=TIMEOUT))
        await asyncio.sleep(0.1)
        await site.restart()
        sends = [asyncio.ensure_future(sender.send([trajectory(row)])) for row in range(6)]  # more than the topic holds
        first = await waiting
        await site.restart()
        rows = [first[0].message.id.row, *await take(receiver, range(1, 6))]
        assert list(dict.fromkeys(rows)) == list(range(6))
        await asyncio.wait_for(asyncio.gather(*sends), TIMEOUT)


async def test_what_was_taken_comes_again_and_is_said_to(tmp_path):
    async with DurableSite(tmp_path) as site:
        sender, receiver = site.sender(), site.receiver()
        await sender.send([trajectory(0)])
        assert len(await receiver.receive(max_items=1, timeout=TIMEOUT)) == 1
        await sender.send([trajectory(1)])  # with it goes what was taken before
        await site.restart()
        deliveries = []
        while len(deliveries) < 2:
            deliveries += await receiver.receive(max_items=5, timeout=TIMEOUT)
        assert [(each.message.id.row, each.redelivered) for each in deliveries] == [(0, True), (1, False)]


async def test_the_end_of_the_stream_outlives_the_broker_and_may_be_said_to_any(tmp_path):
    async with DurableSite(tmp_path) as site:
        sender, receiver = site.sender(), site.receiver()
        await sender.send([trajectory(0)])
        await site.crash()
        closing = asyncio.ensure_future(sender.close())
        await asyncio.sleep(0.1)
        await site.start()
        await asyncio.wait_for(closing, TIMEOUT)
        await site.restart()
        assert await take(receiver, [0]) == [0]
        with pytest.raises(StreamClosed):
            await receiver.receive(max_items=1, timeout=TIMEOUT)
        again = site.sender()
        await again.close()  # a producer that was started anew and has nothing left


async def test_a_broker_that_stays_away_ends_the_wait_at_the_deadline(tmp_path):
    async with DurableSite(tmp_path) as site:
        sender = site.sender(silence_seconds=0.4)
        await sender.send([trajectory(0)])
        await site.crash()
        with pytest.raises(DeadlineExceeded, match=r"has been silent for 0\.4 s"):
            await asyncio.wait_for(sender.send([trajectory(1)]), TIMEOUT)
        await site.start()
        await asyncio.wait_for(sent(sender, trajectory(2)), TIMEOUT)
        assert sorted(await take(site.receiver(), [0, 1, 2])) == [0, 1, 2]


async def test_a_newer_receiver_of_a_name_takes_over_at_once(tmp_path):
    async with DurableSite(tmp_path) as site:
        older, newer = site.receiver(consumer="reward"), site.receiver(consumer="reward")
        await site.sender().send([trajectory(row) for row in range(4)])
        assert len(await older.receive(max_items=2, timeout=TIMEOUT)) == 2
        deliveries = []
        while len(deliveries) < 4:
            deliveries += await newer.receive(max_items=5, timeout=TIMEOUT)
        assert [(each.message.id.row, each.redelivered) for each in deliveries] == [(0, True), (1, True), (2, False), (3, False)]
        with pytest.raises(StreamClosed, match="a newer receiver named reward has taken over"):
            await asyncio.wait_for(take(older, [99]), TIMEOUT)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moments=st.lists(st.floats(0.0, 0.15), min_size=1, max_size=5), items=st.sampled_from([1, 3, 20]))
def test_whenever_the_broker_is_lost_everything_arrives_in_order_once_ids_are_dropped(tmp_path_factory, moments, items):
    async def work():
        async with DurableSite(tmp_path_factory.mktemp("site"), items=items) as site:
            sender, receiver = site.sender(), site.receiver()
            rows = range(60)
            taking = asyncio.ensure_future(take(receiver, rows))

            async def send(some):
                for row in some:
                    await sender.send([trajectory(row)])
                    await asyncio.sleep(0.002)

            sending = asyncio.ensure_future(send(rows))
            for moment in moments:
                await asyncio.sleep(moment)
                await site.restart()
            assert await taking == list(rows)
            await asyncio.wait_for(sending, TIMEOUT)

    asyncio.run(work())
