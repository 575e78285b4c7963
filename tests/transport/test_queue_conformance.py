"""What every implementation of Sender and Receiver does: over sockets, and in one process."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from asyncrl.errors import MalformedFrame, MessageTooLarge, StreamClosed
from asyncrl.messages import GroupId, ScoredGroup, Trajectory
from asyncrl.transport.envelopes import pack
from asyncrl.transport.exchange import NoHooks
from tests.messages.samples import scored_group, trajectory
from tests.transport.queues import TIMEOUT, QueueUnderTest, topic
from tests.waiting import until


@pytest.fixture(params=["socket", "local"])
async def queue(request):
    queue = QueueUnderTest(request.param)
    yield queue
    await queue.close()


def ids(deliveries) -> list[str]:
    return [str(delivery.message.id) for delivery in deliveries]


def sizes_of(*messages: Trajectory) -> list[int]:
    return [len(pack(message).payload) for message in messages]


async def receive_all(receiver, *, max_items: int = 100) -> list:
    """Everything until the stream ends."""
    received = []
    while True:
        try:
            received += await receiver.receive(max_items=max_items, timeout=TIMEOUT)
        except StreamClosed:
            return received


async def test_what_is_sent_is_received_in_order(queue):
    await queue.open(topic())
    sender, receiver = queue.sender(), queue.receiver()
    await sender.send([trajectory(row) for row in range(5)])
    await sender.send([trajectory(5)])
    received = await receiver.receive(max_items=100, timeout=TIMEOUT)
    assert ids(received) == [f"0/{row}/0/0" for row in range(6)]
    assert not any(delivery.redelivered for delivery in received)


async def test_scored_groups_travel_too(queue):
    await queue.open(topic("scored"))
    await queue.sender("scored").send([scored_group(7)])
    [delivery] = await queue.receiver("scored").receive(max_items=1, timeout=TIMEOUT)
    assert isinstance(delivery.message, ScoredGroup)
    assert delivery.message.id == GroupId(0, 7, 0)


async def test_a_full_topic_blocks_the_sender_until_a_receive(queue):
    await queue.open(topic(items=4))
    sender, receiver = queue.sender(), queue.receiver()
    await sender.send([trajectory(row) for row in range(4)])
    blocked = asyncio.create_task(sender.send([trajectory(4)]))
    await until(lambda: queue.stats()["waiting"] > 0)
    assert queue.stats()["depth"] == 4
    assert not blocked.done()
    assert ids(await receiver.receive(max_items=1, timeout=TIMEOUT)) == ["0/0/0/0"]
    await asyncio.wait_for(blocked, TIMEOUT)
    assert ids(await receiver.receive(max_items=100, timeout=TIMEOUT)) == [f"0/{row}/0/0" for row in range(1, 5)]
    assert queue.stats()["max_depth"] == 4


async def test_the_bound_in_bytes_holds_exactly(queue):
    messages = [trajectory(row, num_tokens=100) for row in range(6)]
    size = sizes_of(messages[0])[0]
    await queue.open(topic(size=3 * size))
    sender, receiver = queue.sender(), queue.receiver()
    sending = asyncio.create_task(sender.send(messages))
    await until(lambda: queue.stats()["depth"] == 3)
    assert not sending.done()
    received = []
    while len(received) < 6:
        received += await receiver.receive(max_items=1, timeout=TIMEOUT)
        assert queue.stats()["bytes"] <= 3 * size
    await sending
    assert queue.stats()["max_bytes"] == 3 * size
    assert queue.stats()["max_depth"] == 3


async def test_a_message_larger_than_the_topic_is_refused_and_nothing_of_its_call_is_sent(queue):
    small, large = trajectory(0), trajectory(1, num_tokens=1000)
    await queue.open(topic(size=sizes_of(large)[0] - 1))
    sender, receiver = queue.sender(), queue.receiver()
    with pytest.raises(MessageTooLarge, match=r"queue\.capacity_megabytes"):
        await sender.send([small, large])
    await sender.send([trajectory(2)])
    assert ids(await receiver.receive(max_items=100, timeout=TIMEOUT)) == ["0/2/0/0"]


async def test_a_message_that_breaks_a_rule_is_refused_by_the_sender(queue):
    await queue.open(topic())
    with pytest.raises(MalformedFrame, match="member is at most group_size"):
        await queue.sender().send([trajectory(0, member=9, group_size=8)])


async def test_sixteen_interleaved_groups_of_eight_pass_through_room_for_eight(queue):
    await queue.open(topic(items=8))
    sender, receiver = queue.sender(), queue.receiver()
    messages = [trajectory(row, member) for member in range(8) for row in range(16)]
    sends = [asyncio.create_task(sender.send([message])) for message in messages]
    groups = defaultdict(set)
    while sum(map(len, groups.values())) < len(messages):
        for delivery in await receiver.receive(max_items=64, timeout=TIMEOUT):
            groups[delivery.message.id.group].add(delivery.message.id.member)
    await asyncio.gather(*sends)
    assert all(members == set(range(8)) for members in groups.values())
    assert len(groups) == 16
    assert queue.stats()["max_depth"] <= 8


async def test_two_producers_and_two_consumers_lose_nothing_and_keep_each_producers_order(queue):
    await queue.open(topic(items=5, producers=("left", "right")))
    senders = [queue.sender(producer=name) for name in ("left", "right")]
    receivers = [queue.receiver(), queue.receiver()]

    async def produce(number: int) -> None:
        for row in range(60):
            await senders[number].send([trajectory(row, attempt=number)])
        await senders[number].close()

    async def consume(receiver) -> list[tuple[int, int]]:
        received = await receive_all(receiver, max_items=3)
        return [(delivery.message.id.attempt, delivery.message.id.row) for delivery in received]

    async with asyncio.timeout(TIMEOUT):
        *_, first, second = await asyncio.gather(produce(0), produce(1), *(consume(receiver) for receiver in receivers))
    assert sorted(first + second) == [(number, row) for number in (0, 1) for row in range(60)]
    for received in (first, second):
        for number in (0, 1):
            rows = [row for attempt, row in received if attempt == number]
            assert rows == sorted(rows)
    assert queue.stats()["max_depth"] <= 5


async def test_an_empty_receive_returns_when_its_time_is_over_and_takes_nothing_afterwards(queue):
    await queue.open(topic(items=1))
    sender, receiver = queue.sender(), queue.receiver()
    assert await receiver.receive(max_items=1, timeout=0.05) == []
    await sender.send([trajectory(0)])
    assert queue.stats()["depth"] == 1
    assert ids(await receiver.receive(max_items=1, timeout=0)) == ["0/0/0/0"]


async def test_the_end_of_the_stream_is_typed_and_comes_after_everything_was_taken(queue):
    await queue.open(topic(producers=("left", "right")))
    left, right, receiver = queue.sender(producer="left"), queue.sender(producer="right"), queue.receiver()
    await left.send([trajectory(0)])
    await left.close()
    await left.close()
    with pytest.raises(StreamClosed):
        await left.send([trajectory(1)])
    assert len(await receiver.receive(max_items=10, timeout=TIMEOUT)) == 1
    assert await receiver.receive(max_items=10, timeout=0.05) == [], "right has not closed"
    waiting = asyncio.create_task(receiver.receive(max_items=10, timeout=TIMEOUT))
    await right.send([trajectory(2)])
    await right.close()
    assert ids(await waiting) == ["0/2/0/0"]
    for _ in range(2):
        with pytest.raises(StreamClosed):
            await receiver.receive(max_items=10, timeout=TIMEOUT)


async def test_a_receive_that_waits_when_the_stream_ends_is_told(queue):
    await queue.open(topic())
    sender, receiver = queue.sender(), queue.receiver()
    waiting = asyncio.create_task(receiver.receive(max_items=10, timeout=TIMEOUT))
    await asyncio.sleep(0)
    await sender.close()
    with pytest.raises(StreamClosed):
        await asyncio.wait_for(waiting, TIMEOUT)


async def test_a_producer_that_died_is_not_the_end_and_its_successor_goes_on(queue):
    await queue.open(topic(), lease_seconds=0.3)
    sender, receiver = queue.sender(), queue.receiver()
    await sender.send([trajectory(0)])
    sender.abandon()
    assert len(await receiver.receive(max_items=10, timeout=TIMEOUT)) == 1
    assert await receiver.receive(max_items=10, timeout=0.6) == []
    successor = queue.sender()
    await successor.send([trajectory(1)])
    await successor.close()
    assert ids(await receive_all(receiver)) == ["0/1/0/0"]


async def test_the_credits_of_a_dead_producer_return(queue):
    await queue.open(topic(items=2, producers=("left", "right")), lease_seconds=0.3)
    left, right, receiver = queue.sender(producer="left"), queue.sender(producer="right"), queue.receiver()
    await left.send([trajectory(0), trajectory(1)])
    waits = asyncio.create_task(left.send([trajectory(2)]))
    await until(lambda: queue.stats()["waiting"] > 0)
    left.abandon()
    with pytest.raises(StreamClosed):
        await waits
    sending = asyncio.create_task(right.send([trajectory(3), trajectory(4)]))
    received = []
    while len(received) < 4:
        received += ids(await receiver.receive(max_items=1, timeout=TIMEOUT))
    assert received == ["0/0/0/0", "0/1/0/0", "0/3/0/0", "0/4/0/0"]
    await asyncio.wait_for(sending, TIMEOUT)


async def test_when_a_lease_ends_its_messages_come_first_in_their_order_and_marked(queue):
    await queue.open(topic(items=10), lease_seconds=0.3)
    sender, dying, living = queue.sender(), queue.receiver(), queue.receiver()
    await sender.send([trajectory(row) for row in range(4)])
    assert len(await dying.receive(max_items=3, timeout=TIMEOUT)) == 3
    await dying.settle(["0/1/0/0"])
    await until(lambda: queue.stats()["settled"] == 1)
    dying.abandon()
    await sender.send([trajectory(4)])
    await until(lambda: queue.stats()["returned"] == 2)
    received = await living.receive(max_items=10, timeout=TIMEOUT)
    assert [(str(delivery.message.id), delivery.redelivered) for delivery in received] == [
        ("0/0/0/0", True), ("0/2/0/0", True), ("0/3/0/0", False), ("0/4/0/0", False),
    ]  # fmt: skip


async def test_a_receiver_that_lives_keeps_its_lease_however_long(queue):
    await queue.open(topic(), lease_seconds=0.3)
    sender, holder, other = queue.sender(), queue.receiver(), queue.receiver()
    await sender.send([trajectory(0)])
    assert len(await holder.receive(max_items=1, timeout=TIMEOUT)) == 1
    assert await other.receive(max_items=1, timeout=1.0) == []


async def test_a_receiver_that_closes_gives_its_leases_back(queue):
    await queue.open(topic())
    sender, first, second = queue.sender(), queue.receiver(), queue.receiver()
    await sender.send([trajectory(0), trajectory(1)])
    assert len(await first.receive(max_items=2, timeout=TIMEOUT)) == 2
    await first.settle(["0/0/0/0"])
    await first.close()
    [delivery] = await second.receive(max_items=2, timeout=TIMEOUT)
    assert (str(delivery.message.id), delivery.redelivered) == ("0/1/0/0", True)
    with pytest.raises(StreamClosed):
        await first.receive(max_items=1, timeout=TIMEOUT)


async def test_settling_a_group_removes_what_waits_and_lets_a_blocked_sender_on(queue):
    await queue.open(topic(items=2))
    sender, receiver = queue.sender(), queue.receiver()
    await sender.send([trajectory(0, 0), trajectory(0, 1)])
    blocked = asyncio.create_task(sender.send([trajectory(1)]))
    await until(lambda: queue.stats()["waiting"] > 0)
    assert queue.exchange.settle_group("0/0/0") == 2
    await asyncio.wait_for(blocked, TIMEOUT)
    assert [each.group_id for each in queue.exchange.unsettled("rollouts")] == ["0/1/0"]
    assert ids(await receiver.receive(max_items=10, timeout=TIMEOUT)) == ["0/1/0/0"]


async def test_messages_stay_until_they_are_settled(queue):
    await queue.open(topic())
    sender, receiver = queue.sender(), queue.receiver()
    await sender.send([trajectory(0), trajectory(1)])
    assert [each.state for each in queue.exchange.unsettled("rollouts")] == ["accepted", "accepted"]
    await receiver.receive(max_items=1, timeout=TIMEOUT)
    assert [each.state for each in queue.exchange.unsettled("rollouts")] == ["taken", "accepted"]
    await receiver.settle(["0/0/0/0"])
    await until(lambda: queue.stats()["settled"] == 1)
    assert [each.message_id for each in queue.exchange.unsettled("rollouts")] == ["0/1/0/0"]


class RecordingHooks(NoHooks):
    """Remembers what happened, and knows group 0/9/0 as ended."""

    def __init__(self) -> None:
        self.accepted: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str, str, str]] = []

    def is_ended(self, group_id: str) -> bool:
        return group_id == "0/9/0"

    def on_accept(self, topic, accepted) -> None:
        self.accepted += accepted

    def on_refused(self, topic, message_id, group_id, reason) -> None:
        self.refused.append((topic, message_id, group_id, reason))


async def test_the_owner_hears_of_every_acceptance_before_the_message_can_be_taken(queue):
    hooks = RecordingHooks()
    await queue.open(topic(), hooks=hooks)
    sender, receiver = queue.sender(), queue.receiver()
    waiting = asyncio.create_task(receiver.receive(max_items=10, timeout=TIMEOUT))
    await sender.send([trajectory(0), trajectory(1)])
    assert hooks.accepted == [("0/0/0/0", "0/0/0"), ("0/1/0/0", "0/1/0")]
    assert ids(await waiting) == ["0/0/0/0", "0/1/0/0"]


async def test_second_copies_and_members_of_ended_groups_are_dropped_and_counted(queue):
    hooks = RecordingHooks()
    await queue.open(topic(), hooks=hooks)
    sender = queue.sender()
    await sender.send([trajectory(0), trajectory(0), trajectory(9), trajectory(1)])
    assert [message_id for message_id, _ in hooks.accepted] == ["0/0/0/0", "0/1/0/0"]
    assert queue.stats()["duplicates"] == 2


async def test_a_cancelled_receive_loses_nothing(queue):
    await queue.open(topic())
    sender, receiver = queue.sender(), queue.receiver()
    waiting = asyncio.create_task(receiver.receive(max_items=10, timeout=TIMEOUT))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await sender.send([trajectory(0)])
    assert ids(await receiver.receive(max_items=10, timeout=TIMEOUT)) == ["0/0/0/0"]


async def test_a_cancelled_send_still_arrives_and_close_waits_for_it(queue):
    await queue.open(topic(items=1))
    sender, receiver = queue.sender(), queue.receiver()
    await sender.send([trajectory(0)])
    blocked = asyncio.create_task(sender.send([trajectory(1)]))
    await until(lambda: queue.stats()["waiting"] > 0)
    blocked.cancel()
    await asyncio.gather(blocked, return_exceptions=True)
    _, received = await asyncio.gather(sender.close(), receive_all(receiver))
    assert ids(received) == ["0/0/0/0", "0/1/0/0"]


async def test_many_senders_calls_at_once_keep_their_order(queue):
    await queue.open(topic(items=7))
    sender, receiver = queue.sender(), queue.receiver()
    sends = [asyncio.create_task(sender.send([trajectory(row)])) for row in range(500)]
    received = []
    while len(received) < 500:
        received += ids(await receiver.receive(max_items=5, timeout=TIMEOUT))
    await asyncio.gather(*sends)
    assert received == [f"0/{row}/0/0" for row in range(500)]
    assert queue.stats()["max_depth"] <= 7
