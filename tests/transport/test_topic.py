"""The topic's state machine: whatever producers and consumers do, and whenever they die, its promises hold."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.errors import MessageTooLarge, StreamClosed, TransportError
from asyncrl.transport.records import Incoming
from asyncrl.transport.topic import Topic, TopicSpec

ITEMS, BYTES, LEASE = 6, 100, 10.0
PRODUCERS = ("ann", "bob")


def topic_of(items: int = ITEMS, size: int = BYTES, producers: tuple[str, ...] = PRODUCERS) -> Topic:
    return Topic(TopicSpec("rollouts", items, size, producers), lease_seconds=LEASE)


class Producer:
    """What a sender knows: the messages it has, and how far the topic has told it to go."""

    def __init__(self, name: str, life: int):
        self.name, self.session = name, f"{name}-{life}".encode()
        self.messages: list[Incoming] = []
        self.announced = 0


class TopicMachine(RuleBasedStateMachine):
    """Two producers and two consumers, each of which may crash and come back at any moment; groups end at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.topic = topic_of()
        self.now = 0.0
        self.lives = 0
        self.made = 0
        self.producers = {name: self.new_producer(name) for name in PRODUCERS}
        self.consumers: dict[int, bytes] = {0: b"c0", 1: b"c1"}
        self.held: dict[bytes, set[str]] = defaultdict(set)
        self.accepted: list[str] = []
        self.first_taken: list[str] = []
        self.settled: set[str] = set()
        self.ended: set[str] = set()
        self.closed: set[str] = set()

    def new_producer(self, name: str) -> Producer:
        self.lives += 1
        producer = Producer(name, self.lives)
        self.topic.open_sender(producer.session, name, self.now)
        return producer

    names = st.sampled_from(PRODUCERS)
    seats = st.sampled_from([0, 1])

    @precondition(lambda self: not self.topic.ended)
    @rule(name=names, sizes=st.lists(st.integers(1, 12) | st.integers(1, BYTES), min_size=1, max_size=5))
    def announce(self, name, sizes):
        producer = self.producers[name]
        if name in self.closed:
            return
        for size in sizes:
            self.made += 1
            payload = self.made.to_bytes(4, "big").rjust(size, b"\0")[-size:]
            producer.messages.append(Incoming(f"m{self.made}", f"g{self.made // 3}", payload))
        first = producer.announced
        self.topic.announce(producer.session, first, [len(m.payload) for m in producer.messages[first:]], self.now)
        producer.announced = len(producer.messages)

    @rule()
    def grant(self):
        self.topic.grant(self.now)

    @rule(name=names, behind=st.integers(0, 3), ahead=st.integers(0, 3))
    def write(self, name, behind, ahead):
        """From a little before what was handled (sent again) to a little past what was granted (without credit)."""
        producer = self.producers[name]
        progress = self.topic.progress(producer.session)
        if name in self.closed or progress is None:
            return
        first = max(0, progress.handled - behind)
        batch = producer.messages[first : progress.granted + ahead]
        before = len(self.accepted)
        result = self.topic.accept(producer.session, first, batch, self.now, is_ended=self.ended.__contains__)
        self.accepted += [message_id for message_id, _ in result.accepted]
        after = self.topic.progress(producer.session)
        assert after.handled == progress.granted, "what was granted and written is handled, and nothing else"
        assert len(self.accepted) - before + result.duplicates == after.handled - progress.handled

    @precondition(lambda self: not self.topic.ended)
    @rule(name=names, small=st.integers(1, 8), behind=st.integers(0, 3))
    def send_and_send_again(self, name, small, behind):
        self.announce(name, [small] * small)
        self.topic.grant(self.now)
        self.write(name, behind, ahead=1)

    @rule(seat=seats, max_items=st.integers(1, 5), max_bytes=st.integers(1, 2 * BYTES))
    def take(self, seat, max_items, max_bytes):
        session = self.consumers[seat]
        taken = self.topic.take(session, max_items=max_items, max_bytes=max_bytes, now=self.now)
        sequences = [stored.sequence for stored in taken]
        assert sequences == sorted(sequences)
        assert [stored.redelivered for stored in taken] == sorted((s.redelivered for s in taken), reverse=True)
        for stored in taken:
            assert stored.message_id not in self.settled
            assert all(stored.message_id not in held for held in self.held.values()), "on two leases at once"
            self.held[session].add(stored.message_id)
            if not stored.redelivered:
                self.first_taken.append(stored.message_id)

    @rule(seat=seats, data=st.data())
    def settle(self, seat, data):
        held = sorted(self.held[self.consumers[seat]])
        if held:
            ids = data.draw(st.lists(st.sampled_from(held), unique=True))
            assert self.topic.settle(ids) == len(ids)
            self.forget(set(ids))

    @precondition(lambda self: self.made > 0)
    @rule(data=st.data())
    def end_group(self, data):
        group = f"g{data.draw(st.integers(0, self.made // 3))}"
        ids = {stored.message_id for stored in self.topic.unsettled() if stored.group_id == group}
        assert self.topic.settle_group(group) == len(ids)
        self.ended.add(group)
        self.forget(ids)

    def forget(self, ids: set[str]) -> None:
        self.settled |= ids
        for held in self.held.values():
            held -= ids

    @rule(name=names)
    def crash_and_restart_a_producer(self, name):
        if name not in self.closed:
            self.producers[name] = self.new_producer(name)

    @rule(seat=seats, leaves=st.booleans())
    def crash_a_consumer(self, seat, leaves):
        """A new one takes its seat. The old one left properly, or its lease ends when time passes."""
        old = self.consumers[seat]
        if leaves:
            self.topic.close_consumer(old)
            self.held[old].clear()
        self.lives += 1
        self.consumers[seat] = f"c{self.lives}".encode()

    @rule(name=names)
    def fall_silent(self, name):
        """Everybody but one producer speaks; the lease of that one, and of consumers that crashed, ends."""
        self.now += LEASE + 1
        for other, producer in self.producers.items():
            if other != name and other not in self.closed:
                self.topic.open_sender(producer.session, other, self.now)
        for session in self.consumers.values():
            self.topic.touch_consumer(session, self.now)
        self.topic.expire(self.now)
        for session in list(self.held):
            if session not in self.consumers.values():
                self.held[session].clear()
        if name not in self.closed:
            progress = self.topic.progress(self.producers[name].session)
            assert progress.announced == progress.granted == progress.handled
            self.producers[name].announced = progress.handled

    @precondition(lambda self: self.made > 30)
    @rule(name=names)
    def close(self, name):
        if name not in self.closed:
            self.topic.close_sender(self.producers[name].session, self.now)
            self.closed.add(name)

    @invariant()
    def the_bound_is_never_passed(self):
        items, size = self.topic.committed
        assert 0 <= items <= ITEMS
        assert 0 <= size <= BYTES
        stats = self.topic.stats(self.now)
        assert stats.depth <= stats.max_depth <= ITEMS
        assert stats.bytes <= stats.max_bytes <= BYTES

    @invariant()
    def nothing_is_lost_and_nothing_doubled(self):
        here = [stored.message_id for stored in self.topic.unsettled()]
        assert len(here) == len(set(here))
        assert len(self.accepted) == len(set(self.accepted))
        assert set(here) | self.settled >= set(self.accepted)
        assert not set(here) & self.settled
        stats = self.topic.stats(self.now)
        assert stats.accepted == len(self.accepted)
        assert stats.accepted == stats.settled + len(here)
        assert stats.depth + stats.held + stats.returned == len(here)
        held = sum(map(len, self.held.values()))
        assert stats.held == held

    @invariant()
    def each_producers_order_is_kept(self):
        for producer in self.producers.values():
            own = {message.message_id: number for number, message in enumerate(producer.messages)}
            numbers = [own[message_id] for message_id in self.first_taken if message_id in own]
            assert numbers == sorted(numbers)

    @invariant()
    def only_closing_ends_the_topic(self):
        assert self.topic.ended == (self.closed == set(PRODUCERS))

    def teardown(self):
        """Whatever happened, everything accepted can be taken and settled in the end."""
        self.now += 2 * LEASE
        self.topic.expire(self.now)
        while taken := self.topic.take(b"last", max_items=100, max_bytes=BYTES, now=self.now):
            self.topic.settle(stored.message_id for stored in taken)
        assert self.topic.unsettled() == []
        assert self.topic.committed == (0, 0) or not self.topic.ended


TestTopicMachine = TopicMachine.TestCase
TestTopicMachine.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def not_ended(_group: str) -> bool:
    return False


def accepted(topic: Topic, session: bytes, ids: list[str], size: int = 1, *, group: str = "g") -> None:
    """Announce, grant and write these messages."""
    first = topic.progress(session).announced
    topic.announce(session, first, [size] * len(ids), 0.0)
    topic.grant(0.0)
    topic.accept(session, first, [Incoming(name, group, b"x" * size) for name in ids], 0.0, is_ended=not_ended)


def taken(topic: Topic, session: bytes = b"c", max_items: int = 100, now: float = 0.0) -> list[str]:
    return [stored.message_id for stored in topic.take(session, max_items=max_items, max_bytes=10**9, now=now)]


def test_credits_go_out_in_the_order_of_announcement_and_nothing_overtakes_a_large_message():
    topic = topic_of(items=10, size=10)
    topic.open_sender(b"a", "ann", 0.0)
    topic.open_sender(b"b", "bob", 0.0)
    topic.announce(b"a", 0, [8], 0.0)
    topic.announce(b"b", 0, [8, 1], 0.0)
    topic.announce(b"a", 1, [1], 0.0)
    assert topic.grant(0.0) == [b"a"]
    assert topic.progress(b"a").granted == 1, "the small one would fit, but bob's large one asked before it"
    topic.accept(b"a", 0, [Incoming("m", "g", b"x" * 8)], 0.0, is_ended=not_ended)
    assert topic.grant(0.0) == []
    assert taken(topic) == ["m"]
    assert topic.grant(0.0) == [b"b", b"a"]


def test_returned_messages_come_first_in_their_original_order_whoever_held_them():
    topic = topic_of(items=10)
    topic.open_sender(b"a", "ann", 0.0)
    accepted(topic, b"a", ["m0", "m1", "m2", "m3", "m4", "m5"])
    assert taken(topic, b"c0", 2) == ["m0", "m1"]
    assert taken(topic, b"c1", 2) == ["m2", "m3"]
    topic.close_consumer(b"c1")
    topic.close_consumer(b"c0")
    again = topic.take(b"c2", max_items=5, max_bytes=10**9, now=0.0)
    assert [(stored.message_id, stored.redelivered) for stored in again] == [
        ("m0", True), ("m1", True), ("m2", True), ("m3", True), ("m4", False),
    ]  # fmt: skip


def test_a_lease_lasts_as_long_as_its_holder_speaks_however_old_it_is():
    topic = topic_of()
    topic.open_sender(b"a", "ann", 0.0)
    accepted(topic, b"a", ["m0"])
    taken(topic, b"c")
    for now in range(0, 100, 5):
        topic.touch_consumer(b"c", float(now))
        topic.expire(float(now))
    assert taken(topic, b"other", now=95.0) == []
    topic.expire(95.0 + LEASE + 1)
    assert taken(topic, b"other", now=106.0) == ["m0"]


def test_messages_taken_once_stay_outside_the_bound_when_they_return():
    topic = topic_of(items=2)
    topic.open_sender(b"a", "ann", 0.0)
    accepted(topic, b"a", ["m0", "m1"])
    taken(topic, b"c")
    accepted(topic, b"a", ["m2", "m3"])
    topic.close_consumer(b"c")
    stats = topic.stats(0.0)
    assert (stats.depth, stats.returned) == (2, 2)
    assert taken(topic, b"d") == ["m0", "m1", "m2", "m3"]


def test_a_producer_that_died_never_reads_as_the_end_of_the_data():
    topic = topic_of()
    topic.open_sender(b"a", "ann", 0.0)
    topic.open_sender(b"b", "bob", 0.0)
    topic.close_sender(b"a", 0.0)
    topic.expire(1000.0)
    assert not topic.ended
    topic.open_sender(b"b2", "bob", 1000.0)
    topic.close_sender(b"b", 1000.0)  # the one that died, late: bob is another now
    assert not topic.ended
    topic.close_sender(b"b2", 1000.0)
    assert topic.ended
    with pytest.raises(StreamClosed):
        topic.open_sender(b"b3", "bob", 1001.0)


def test_a_producer_that_closed_may_come_back_while_the_topic_lives_and_must_close_again():
    topic = topic_of()
    topic.open_sender(b"a", "ann", 0.0)
    topic.open_sender(b"b", "bob", 0.0)
    topic.close_sender(b"a", 0.0)
    topic.open_sender(b"a2", "ann", 0.0)
    topic.close_sender(b"b", 0.0)
    assert not topic.ended
    topic.close_sender(b"a2", 0.0)
    assert topic.ended


def test_a_sender_that_was_taken_over_is_told_so_and_its_credits_are_free_again():
    topic = topic_of(items=2)
    topic.open_sender(b"a", "ann", 0.0)
    topic.announce(b"a", 0, [1, 1], 0.0)
    topic.grant(0.0)
    topic.open_sender(b"a2", "ann", 0.0)
    with pytest.raises(StreamClosed, match="taken over"):
        topic.announce(b"a", 2, [1], 0.0)
    accepted(topic, b"a2", ["m0", "m1"])
    assert taken(topic) == ["m0", "m1"]


def test_strangers_are_refused():
    topic = topic_of()
    with pytest.raises(TransportError, match="was told of ann, bob"):
        topic.open_sender(b"x", "eve", 0.0)
    with pytest.raises(TransportError, match="does not know"):
        topic.announce(b"x", 0, [1], 0.0)


def test_a_message_that_can_never_fit_is_refused_when_it_is_announced():
    topic = topic_of(size=100)
    topic.open_sender(b"a", "ann", 0.0)
    with pytest.raises(MessageTooLarge, match="101 bytes"):
        topic.announce(b"a", 0, [50, 101], 0.0)
    assert topic.progress(b"a").announced == 0


def test_a_payload_of_another_size_than_announced_is_refused_and_its_credit_returns():
    topic = topic_of()
    topic.open_sender(b"a", "ann", 0.0)
    topic.announce(b"a", 0, [4, 4], 0.0)
    topic.grant(0.0)
    batch = [Incoming("m0", "g", b"xxxxx"), Incoming("m1", "g", b"xxxx")]
    result = topic.accept(b"a", 0, batch, 0.0, is_ended=not_ended)
    assert result.refused == [(0, "4 bytes were announced, 5 came")]
    assert result.accepted == [("m1", "g")]
    assert topic.committed == (1, 4)


def test_a_second_copy_is_dropped_while_the_first_is_unsettled_and_when_its_group_has_ended():
    topic = topic_of()
    topic.open_sender(b"a", "ann", 0.0)
    accepted(topic, b"a", ["m0", "m0"])
    assert taken(topic) == ["m0"]
    assert topic.stats(0.0).duplicates == 1
    topic.announce(b"a", 2, [1], 0.0)
    topic.grant(0.0)
    result = topic.accept(b"a", 2, [Incoming("m9", "over", b"x")], 0.0, is_ended=lambda group: group == "over")
    assert (result.duplicates, result.accepted) == (1, [])


def test_throughput_is_what_was_accepted_since_the_first_acceptance():
    topic = topic_of(items=8)
    topic.open_sender(b"a", "ann", 0.0)
    assert (topic.stats(5.0).accepted_per_second, topic.stats(5.0).bytes_per_second) == (0.0, 0.0)
    topic.announce(b"a", 0, [2, 2, 2, 2], 10.0)
    topic.grant(10.0)
    topic.accept(b"a", 0, [Incoming("m0", "g", b"xx")], 10.0, is_ended=not_ended)
    topic.accept(b"a", 1, [Incoming(f"m{number}", "g", b"xx") for number in (1, 2, 3)], 11.0, is_ended=not_ended)
    assert (topic.stats(12.0).accepted_per_second, topic.stats(12.0).bytes_per_second) == (2.0, 4.0)


def test_blocked_seconds_count_the_time_without_credit():
    topic = topic_of(items=1)
    topic.open_sender(b"a", "ann", 0.0)
    topic.announce(b"a", 0, [1, 1], 10.0)
    topic.grant(10.0)
    topic.accept(b"a", 0, [Incoming("m0", "g", b"x")], 11.0, is_ended=not_ended)
    assert topic.stats(13.0).blocked_seconds == 3.0
    taken(topic)
    topic.grant(14.0)
    assert topic.stats(20.0).blocked_seconds == 4.0
