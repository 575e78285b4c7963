"""The queue's topics behind one face: what the message_queue service and the simulator see, whichever way messages travel.

    Broker (sockets) ─┐                              ┌─▶ Topic "rollouts"
                      ├─▶ Exchange ── hooks ──▶ …    │
    LocalQueue ───────┘        └─────────────────────┴─▶ Topic "scored"

`on_accept` runs before an accepted message can be taken and before its sender learns of it, once per topic for all that came in
at one wake-up; then the journal writes what is left of it, and `commit` makes all of that stand. All calls come from one thread.

With a journal that keeps payloads, what is taken has its payload there alone: memory holds what was never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from asyncrl.errors import TransportError
from asyncrl.transport.blocks import Payload
from asyncrl.transport.journal import Journal, NoJournal, Recovered
from asyncrl.transport.journal.segments import WrongRecord
from asyncrl.transport.records import Acceptance, Incoming, MessageState, Session, Stored, TopicSpec, Written
from asyncrl.transport.topic import Topic


class Unsettled(NamedTuple):
    """An accepted, unsettled message. States: "accepted" (never taken), "taken" (on lease), "returned" (its lease ended)."""

    message_id: str
    group_id: str
    state: MessageState


class Taken(NamedTuple):
    """A message on its way to a receiver. `redelivered`: an earlier holder's lease ended."""

    message_id: str
    payload: Payload
    redelivered: bool


class QueueHooks(Protocol):
    """What the owner of the queue does when something happens in it. A hook may settle; an exception in one ends the broker."""

    def is_ended(self, group_id: str) -> bool:
        """True: this group has an end, and a message of it that arrives now is dropped as a duplicate."""

    def on_accept(self, topic: str, accepted: Sequence[tuple[str, str]]) -> None:
        """These (message_id, group_id) are accepted, in this order."""

    def on_refused(self, topic: str, message_id: str, group_id: str, reason: str) -> None:
        """The payload of this accepted message is no message (its receiver could not decode it); it is settled already. Whoever
        owns the group's state must end it, else it stays open."""

    def on_lost(self, topic: str, message_id: str, group_id: str, reason: str) -> None:
        """The payload of this accepted message could not be read back from the journal; it is settled already."""

    def on_streams(self, topic: str, closed: frozenset[str]) -> None:
        """These producers' streams have ended, and no others."""

    def commit(self) -> None:
        """Everything that `on_accept`, settlements and the journal's rows changed stands when this returns: then others are
        told."""


class NoHooks:
    """Nothing happens."""

    def is_ended(self, group_id: str) -> bool:
        return False

    def on_accept(self, topic: str, accepted: Sequence[tuple[str, str]]) -> None:
        pass

    def on_refused(self, topic: str, message_id: str, group_id: str, reason: str) -> None:
        pass

    def on_lost(self, topic: str, message_id: str, group_id: str, reason: str) -> None:
        pass

    def on_streams(self, topic: str, closed: frozenset[str]) -> None:
        pass

    def commit(self) -> None:
        pass


class Exchange:
    """Topics by name, with the hooks between acceptance and taking."""

    def __init__(
        self,
        topics: Iterable[TopicSpec],
        *,
        lease_seconds: float,
        hooks: QueueHooks | None = None,
        journal: Journal | None = None,
    ):
        self.lease_seconds = lease_seconds
        self.journal: Journal = journal if journal is not None else NoJournal()
        self.hooks: QueueHooks = hooks if hooks is not None else NoHooks()
        self.topics = {spec.name: Topic(spec, lease_seconds=lease_seconds) for spec in topics}
        self.wake: Callable[[], None] = lambda: None  # whoever moves messages sets it: called when capacity may have become free
        self._just_accepted: dict[str, list[tuple[str, str]]] = {}

    # ── for the owner of the queue ───────────────────────────────────────────────────────────────────────────────────

    def settle(self, topic: str, message_ids: Iterable[str]) -> int:
        """These messages are done with; returns how many were here."""
        of = self.topic(topic)
        settled = of.settle(message_ids)
        if settled:
            self._let_go(of)
            self.wake()
        return settled

    def settle_group(self, group_id: str, topic: str | None = None) -> int:
        """Every message of this group is done with, in one topic or in all; returns how many were here."""
        return sum([self.settle_groups((group_id,), name) for name in (self.topics if topic is None else (topic,))])

    def settle_groups(self, group_ids: Iterable[str], topic: str) -> int:
        """Every message of these groups is done with; returns how many were here."""
        of = self.topic(topic)
        settled = sum(map(of.settle_group, group_ids))
        if settled:
            self._let_go(of)
            self.wake()
        return settled

    def retain_group(self, group_id: str, topic: str) -> int:
        """As `settle_group`, but the journal keeps the messages until it is told to `release` them."""
        of = self.topic(topic)
        settled = of.settle_group(group_id)
        if of.gone:
            self.journal.retain(group_id, of.gone)
            of.gone = []
        if settled:
            self.wake()
        return settled

    def restore(self, messages: Iterable[Recovered]) -> None:
        """What the journal recovered, in the order of acceptance; before anybody is served."""
        for ticket, topic, message_id, group_id, size, taken in messages:
            self.topic(topic).restore(message_id, group_id, size, ticket, taken=taken)

    def unsettled(self, topic: str) -> list[Unsettled]:
        """In order of acceptance."""
        return [Unsettled(stored.message_id, stored.group_id, stored.state) for stored in self.topic(topic).unsettled()]

    def stats(self, now: float) -> dict[str, dict[str, float]]:
        """Figures of each topic (`TopicStats`), with capacity_items and capacity_bytes."""
        return {
            name: {
                "capacity_items": topic.spec.capacity_items,
                "capacity_bytes": topic.spec.capacity_bytes,
                **topic.stats(now).to_mapping(),
            }
            for name, topic in self.topics.items()
        }

    # ── for those who move messages ──────────────────────────────────────────────────────────────────────────────────

    def topic(self, name: str) -> Topic:
        """Raises TransportError for a name that is no topic."""
        topic = self.topics.get(name)
        if topic is None:
            raise TransportError(f"there is no topic {name!r}; there are {', '.join(self.topics)}")
        return topic

    def open_sender(self, topic: str, session: Session, producer: str, now: float) -> None:
        """`Topic.open_sender`; `publish` must follow before anybody is told."""
        of = self.topic(topic)
        before = of.closed_producers
        of.open_sender(session, producer, now)
        self._tell_streams(of, before)

    def close_sender(self, topic: str, session: Session, now: float) -> None:
        """`Topic.close_sender`; `publish` must follow before anybody is told."""
        of = self.topic(topic)
        before = of.closed_producers
        of.close_sender(session, now)
        self._tell_streams(of, before)

    def accept(self, topic: str, session: Session, first: int, batch: Sequence[Written], now: float) -> Acceptance:
        """`Topic.accept` with the hooks' duplicate filter; `publish` must follow before anybody is told."""
        result = self.topic(topic).accept(session, first, batch, now, is_ended=self.hooks.is_ended)
        if result.accepted:
            self._just_accepted.setdefault(topic, []).extend(result.accepted)
        return result

    def publish(self) -> None:
        """Call `on_accept` for what was accepted since the last time, and make it stand."""
        while self._just_accepted:
            topic, accepted = self._just_accepted.popitem()
            self.hooks.on_accept(topic, accepted)
            if self.journal.keeps:
                self._put_down(topic, accepted)
        self.journal.write()
        self.hooks.commit()
        self.journal.written()

    def take(self, topic: str, session: Session, *, max_items: int, max_bytes: int, now: float) -> list[Taken]:
        """`Topic.take`, never before `on_accept`."""
        self.publish()
        of = self.topic(topic)
        stored = of.take(session, max_items=max_items, max_bytes=max_bytes, now=now)
        if self.journal.keeps:
            return self._fetch(of, stored)
        return [Taken(each.message_id, each.payload, each.redelivered) for each in stored if each.payload is not None]

    def refuse(self, topic: str, message_id: str, reason: str) -> None:
        """A receiver could not decode this message: it is settled and counted, and `on_refused` is told."""
        of = self.topic(topic)
        stored = of.find(message_id)
        if stored is not None:
            of.settle((message_id,))
            self._let_go(of)
            of.refuse()
            self.hooks.on_refused(topic, message_id, stored.group_id, reason)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _put_down(self, topic: str, accepted: Sequence[tuple[str, str]]) -> None:
        """What is accepted, and was not settled on the spot, goes into the journal."""
        of = self.topics[topic]
        kept = [stored for message_id, _ in accepted if (stored := of.find(message_id)) is not None]
        messages = [Incoming(each.message_id, each.group_id, each.payload) for each in kept if each.payload is not None]
        for stored, ticket in zip(kept, self.journal.append(topic, messages), strict=True):
            stored.ticket = ticket

    def _tell_streams(self, topic: Topic, before: frozenset[str]) -> None:
        if topic.closed_producers != before:
            self.hooks.on_streams(topic.spec.name, topic.closed_producers)

    def _let_go(self, topic: Topic) -> None:
        if topic.gone:
            self.journal.settle(topic.gone)
            topic.gone = []

    def _fetch(self, topic: Topic, stored: Sequence[Stored]) -> list[Taken]:
        """Payloads of what was taken, which memory holds no longer. One that cannot be read is lost, and the hooks hear of it."""
        taken = []
        lost = []
        for each in stored:
            try:
                payload = each.payload if each.payload is not None else self.journal.read(each.ticket)
            except WrongRecord as error:
                lost.append((each, str(error)))
                continue
            each.payload = None
            taken.append(Taken(each.message_id, payload, each.redelivered))
        if stored:
            self.journal.mark_taken(topic.spec.name, max(each.ticket for each in stored))
        for each, reason in lost:
            self.settle(topic.spec.name, (each.message_id,))
            self.hooks.on_lost(topic.spec.name, each.message_id, each.group_id, reason)
        return taken
