"""Messages live and end with the ledger's attempts, whoever moves them."""

from __future__ import annotations

import pytest

from asyncrl.errors import IllegalTransition
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, PromptCursor, StepRecord
from asyncrl.services.message_queue.settling import ROLLOUTS, SCORED, connect
from asyncrl.transport.records import Incoming, TopicSpec

CURSOR = PromptCursor(0, 9, None, 0, False)


def id_of(row):
    return GroupId(0, row, 0)


class Queue:
    """An exchange with a ledger behind it, two senders and a receiver of each topic; every wake-up is one call."""

    def __init__(self, capacity=100):
        self.ledger = LocalLedgerClient()
        topics = [TopicSpec(ROLLOUTS, capacity, 10_000, ("rollouter",)), TopicSpec(SCORED, capacity, 10_000, ("reward",))]
        self.hooks = connect(self.ledger, topics, lease_seconds=30)
        self.exchange = self.hooks.exchange
        for topic, producer in ((ROLLOUTS, "rollouter"), (SCORED, "reward")):
            self.exchange.topic(topic).open_sender(producer.encode(), producer, 0.0)
        self.sent = {ROLLOUTS: 0, SCORED: 0}

    async def dispatch(self, *rows):
        await self.ledger.dispatch([Dispatch(id_of(row), 0) for row in rows], CURSOR)

    def send(self, topic, *messages, publish=True):
        """Messages are (message id, group id)."""
        session = b"rollouter" if topic == ROLLOUTS else b"reward"
        self.exchange.topic(topic).announce(session, self.sent[topic], [1] * len(messages), 0.0)
        self.exchange.topic(topic).grant(0.0)
        batch = [Incoming(message_id, group_id, b"x") for message_id, group_id in messages]
        result = self.exchange.accept(topic, session, self.sent[topic], batch, 0.0)
        self.sent[topic] += len(messages)
        if publish:
            self.exchange.publish()
        return result

    def send_members(self, row, members):
        return self.send(ROLLOUTS, *[(str(id_of(row).member(member)), str(id_of(row))) for member in members])

    def send_scored(self, *rows, publish=True):
        return self.send(SCORED, *[(str(id_of(row)), str(id_of(row))) for row in rows], publish=publish)

    def take(self, topic):
        taken = self.exchange.take(topic, b"consumer", max_items=100, max_bytes=10_000, now=0.0)
        return [stored.message_id for stored in taken]

    def unsettled(self, topic):
        return [each.message_id for each in self.exchange.unsettled(topic)]


async def test_an_accepted_scored_group_is_queued_and_its_trajectories_are_settled():
    queue = Queue()
    await queue.dispatch(1, 2)
    queue.send_members(1, range(3))
    queue.send_members(2, range(3))
    queue.take(ROLLOUTS)
    queue.send_scored(1)
    assert queue.ledger.attempts.state(id_of(1)) == "queued"
    assert queue.unsettled(ROLLOUTS) == [f"0/2/0/{member}" for member in range(3)]
    assert queue.unsettled(SCORED) == ["0/1/0"]


async def test_nobody_takes_a_scored_group_before_the_ledger_has_it():
    queue = Queue()
    await queue.dispatch(1)
    queue.send_scored(1, publish=False)
    assert queue.ledger.attempts.state(id_of(1)) == "in_flight"
    assert queue.take(SCORED) == ["0/1/0"]
    assert queue.ledger.attempts.state(id_of(1)) == "queued"


async def test_a_finished_step_settles_what_it_took_and_nothing_else():
    queue = Queue()
    await queue.dispatch(1, 2)
    queue.send_scored(1, 2)
    queue.take(SCORED)
    assert queue.unsettled(SCORED) == ["0/1/0", "0/2/0"]
    await queue.ledger.finish_step(StepRecord(1, 0, (End(id_of(1), "trained"),)))
    assert queue.unsettled(SCORED) == ["0/2/0"]


async def test_an_end_settles_trajectories_nobody_has_taken_and_frees_their_room():
    queue = Queue()
    woken = []
    queue.exchange.wake = lambda: woken.append(True)
    await queue.dispatch(1)
    queue.send_members(1, range(3))
    await queue.ledger.end([End(id_of(1), "failed", "lost")])
    assert queue.unsettled(ROLLOUTS) == []
    assert woken


@pytest.mark.parametrize("topic", [ROLLOUTS, SCORED])
@pytest.mark.parametrize("group", ["0/1/0", "0/7/0", "no id", "0/1/0/0", "0/0_1/0", ""])
async def test_a_message_of_a_group_that_is_not_live_is_dropped(topic, group):
    queue = Queue()
    await queue.dispatch(1)
    await queue.ledger.end([End(id_of(1), "failed", "lost")])
    result = queue.send(topic, (f"{group}/0", group))
    assert (result.accepted, result.duplicates) == ([], 1)
    assert queue.unsettled(topic) == []


async def test_a_second_copy_of_a_scored_group_changes_nothing():
    queue = Queue()
    await queue.dispatch(1)
    queue.send_scored(1)
    assert queue.send_scored(1).duplicates == 1
    queue.send(SCORED, ("another name", "0/1/0"))
    queue.send(SCORED, ("a third", "0/1/0"), ("a fourth", "0/1/0"))
    assert queue.unsettled(SCORED) == ["0/1/0"]
    assert queue.ledger.attempts.counts()["queued"] == 1


async def test_two_copies_at_one_wake_up_are_one():
    queue = Queue()
    await queue.dispatch(1)
    queue.send(SCORED, ("0/1/0", "0/1/0"), ("another name", "0/1/0"))
    assert queue.unsettled(SCORED) == ["0/1/0"]


async def test_a_trajectory_that_comes_after_its_scored_group_is_settled_at_once():
    queue = Queue()
    await queue.dispatch(1)
    queue.send_scored(1)
    queue.send_members(1, [0])
    assert queue.unsettled(ROLLOUTS) == []
    assert queue.unsettled(SCORED) == ["0/1/0"]


@pytest.mark.parametrize("topic", [ROLLOUTS, SCORED])
async def test_a_payload_that_is_no_message_fails_its_group_by_name(topic):
    queue = Queue()
    await queue.dispatch(1)
    queue.send_members(1, range(2))
    if topic == SCORED:
        queue.send_scored(1)
    message = queue.take(topic)[0]
    queue.exchange.refuse(topic, message, "bad header")
    assert queue.ledger.attempts.counts()["failed"] == 1
    assert queue.ledger.attempts.reasons == {"failed: malformed message": 1}
    assert queue.unsettled(ROLLOUTS) == queue.unsettled(SCORED) == []
    await queue.ledger.end([End(id_of(1), "failed", "too few scored: 1 of 2")])  # the Reward front could not know
    assert queue.ledger.attempts.counts()["failed"] == 1


async def test_a_group_that_ends_between_acceptance_and_publication_stays_ended():
    queue = Queue()
    await queue.dispatch(1)
    queue.send_members(1, range(2))
    message = queue.take(ROLLOUTS)[0]
    queue.send_scored(1, publish=False)
    queue.exchange.refuse(ROLLOUTS, message, "bad header")
    assert queue.take(SCORED) == []
    assert queue.ledger.attempts.counts()["failed"] == 1
    assert queue.unsettled(SCORED) == []


async def test_the_end_of_training_empties_both_topics():
    queue = Queue()
    await queue.dispatch(1, 2, 3)
    queue.send_members(1, range(2))
    queue.send_scored(2)
    await queue.ledger.finish_training(5)
    assert queue.unsettled(ROLLOUTS) == queue.unsettled(SCORED) == []
    assert queue.ledger.attempts.live() == []


async def test_groups_survive_interleaving_in_a_topic_smaller_than_them():
    queue = Queue(capacity=8)
    await queue.dispatch(*range(16))
    assembled = {row: set() for row in range(16)}
    for member in range(8):
        for first in range(0, 16, 8):
            for row in range(first, first + 8):
                queue.send_members(row, [member])
            for message in queue.take(ROLLOUTS):
                _, row, _, taken_member = map(int, message.split("/"))
                assembled[row].add(taken_member)
    assert all(members == set(range(8)) for members in assembled.values())
    for row in range(16):
        queue.send_scored(row)
        queue.take(SCORED)
    assert queue.unsettled(ROLLOUTS) == []
    assert queue.ledger.attempts.counts()["queued"] == 16


async def test_the_ledger_refuses_what_the_queue_never_had():
    queue = Queue()
    await queue.dispatch(1)
    with pytest.raises(IllegalTransition, match="it is in flight"):
        await queue.ledger.finish_step(StepRecord(1, 0, (End(id_of(1), "trained"),)))
