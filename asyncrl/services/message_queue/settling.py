"""What the queue and the ledger tell each other, without sockets: the service and the simulator both use it.

a scored group is accepted    → its attempt is queued, its trajectories are settled; only then can it be taken
an attempt ends               → its messages are settled in both topics; where checkpoints are written and the queue is durable,
                                its scored group is delivered no more, but retained until a checkpoint holds the end
a checkpoint holds step s     → what ended up to s is settled
a message of an attempt that is not live arrives   → dropped as a duplicate
a message turns out to be none                     → its attempt has failed
a message cannot be read back                      → its attempt has failed, and its prompt starts again

All of it is in the ledger's file, with the journal's rows, before a sender, a receiver or a watcher is told (`commit`).
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterable, Sequence

from asyncrl.config.schema import Config
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.ledger.set_back import Held
from asyncrl.messages import GroupId, TrajectoryId
from asyncrl.protocols import End
from asyncrl.transport.exchange import Exchange
from asyncrl.transport.journal import Fate, Journal
from asyncrl.transport.topic import TopicSpec

ROLLOUTS, SCORED = "rollouts", "scored"
log = logging.getLogger(__name__)


def topics_of(config: Config) -> list[TopicSpec]:
    """The two topics, each with the capacity of the `queue` section and the one producer whose end is the topic's end."""
    capacity_bytes = int(config.queue.capacity_megabytes * 1e6)
    producers = {ROLLOUTS: "rollouter", SCORED: "reward"}
    return [TopicSpec(name, config.queue.capacity, capacity_bytes, (producer,)) for name, producer in producers.items()]


def connect(
    ledger: LocalLedgerClient,
    topics: Iterable[TopicSpec],
    *,
    lease_seconds: float,
    journal: Journal | None = None,
    retains: bool = False,
    members_per_group: int | None = None,
) -> LedgerHooks:
    """An exchange (`.exchange`) whose messages live and end with the ledger's attempts. `retains`: scored groups wait for a
    checkpoint. With `members_per_group` the ledger learns what the queue holds, so that a rollouter can be told what is
    missing."""
    hooks = LedgerHooks(ledger, retains=retains)
    hooks.exchange = Exchange(topics, lease_seconds=lease_seconds, hooks=hooks, journal=journal)
    ledger.on_end, ledger.on_checkpoint = hooks.settle, hooks.release
    if members_per_group is not None:
        ledger.held = lambda: hooks.held(members_per_group)
    return hooks


class LedgerHooks:
    """`QueueHooks` over a ledger. `kept`: groups that are queued without a message, because only the trainer holds them."""

    exchange: Exchange

    def __init__(self, ledger: LocalLedgerClient, *, retains: bool = False):
        self._ledger, self._retains = ledger, retains
        self._retained: deque[tuple[int, GroupId]] = deque()  # (first step whose checkpoint holds its end, id)
        self.kept: frozenset[GroupId] = frozenset()

    def is_ended(self, group_id: str) -> bool:
        """Only the messages of an attempt without an end are wanted; an id that is none belongs to no attempt."""
        id = parse(group_id)
        return id is None or id not in self._ledger.attempts

    def on_accept(self, topic: str, accepted: Sequence[tuple[str, str]]) -> None:
        open = {group_id: self._is_open(group_id) for group_id in dict.fromkeys([group_id for _, group_id in accepted])}
        queued: dict[str, None] = {}
        second_copies = []
        for message_id, group_id in accepted:
            if not open[group_id] or group_id in queued:
                second_copies.append(message_id)  # of a group whose scored group is here
            elif topic == SCORED:
                queued[group_id] = None
        self.exchange.settle(topic, second_copies)
        if queued:
            self._ledger.queue([GroupId.parse(group_id) for group_id in queued])
            self.exchange.settle_groups(queued, ROLLOUTS)

    def _is_open(self, group_id: str) -> bool:
        """Whether this attempt's scored group is still to come."""
        id = parse(group_id)
        assert id is not None, "what is accepted has not ended"
        return self._ledger.attempts.state(id) in ("in_flight", "returned")

    def on_refused(self, topic: str, message_id: str, group_id: str, reason: str) -> None:
        log.warning("message %s of topic %s is no message: %s", message_id, topic, reason)
        id = parse(group_id)
        if id is not None and id in self._ledger.attempts:
            self._ledger.cut_short([End(id, "failed", f"malformed message: {message_id} in {topic}: {reason}")])

    def on_lost(self, topic: str, message_id: str, group_id: str, reason: str) -> None:
        log.error("message %s of topic %s is lost: %s", message_id, topic, reason)
        id = parse(group_id)
        if id is not None and id in self._ledger.attempts:
            end = End(id, "failed", f"lost from the queue's journal: {message_id} in {topic}: {reason}", reissue=True)
            self._ledger.cut_short([end])

    def on_streams(self, topic: str, closed: frozenset[str]) -> None:
        self._ledger.close_streams(topic, closed)

    def commit(self) -> None:
        if self._ledger.dirty:
            self._ledger.flush()

    def settle(self, ended: Sequence[GroupId], step: int) -> None:
        """These attempts have ended; the checkpoint of `step` will hold it."""
        group_ids = list(map(str, ended))
        self.exchange.settle_groups(group_ids, ROLLOUTS)
        if not self._retains:
            self.exchange.settle_groups(group_ids, SCORED)
            return
        for id, group_id in zip(ended, group_ids, strict=True):
            if self.exchange.retain_group(group_id, SCORED):
                self._retained.append((step, id))

    def release(self, step: int) -> None:
        """A committed checkpoint holds every end up to this step's."""
        released = []
        while self._retained and self._retained[0][0] <= step:
            released.append(str(self._retained.popleft()[1]))
        self.exchange.journal.release(released)
        self.exchange.wake()

    def fate_of(self, topic: str, group_id: str, ended_by: dict[GroupId, int]) -> Fate:
        """What becomes of a message that an earlier process accepted. `ended_by`: for ended groups, the first step whose
        checkpoint holds the end; which steps have one is not known here, so it is retained until the next."""
        id = parse(group_id)
        state = "unknown" if id is None else self._ledger.attempts.state(id)
        if topic == ROLLOUTS:
            return "deliver" if state in ("in_flight", "returned") else "drop"
        if state == "queued":
            return "deliver"
        if self._retains and id is not None and id in ended_by:
            self._retained.append((ended_by[id], id))
            return "retain"
        return "drop"

    def sort_retained(self) -> None:
        """After all fates are known: by the step that they wait for."""
        self._retained = deque(sorted(self._retained))

    def queued(self) -> list[str]:
        """Text ids of the groups whose scored group the queue holds, has lent, or knows in the trainer's hands."""
        attempts = self._ledger.attempts
        held = [each.group_id for each in self.exchange.unsettled(SCORED)]
        return list(dict.fromkeys([*held, *(str(id) for id in sorted(self.kept) if attempts.state(id) == "queued")]))

    def held(self, members_per_group: int) -> Held:
        """What the queue holds, unsettled, whoever has it on lease."""
        return held_of(members_per_group, self.queued(), [each.message_id for each in self.exchange.unsettled(ROLLOUTS)])


def held_of(members_per_group: int, scored: Iterable[str], trajectories: Iterable[str]) -> Held:
    """From text ids of scored groups and of trajectories."""
    members: dict[GroupId, set[int]] = {}
    for message_id in trajectories:
        id = TrajectoryId.parse(message_id)
        members.setdefault(id.group, set()).add(id.member)
    return Held(members_per_group, {GroupId.parse(group_id) for group_id in scored}, members)


@functools.lru_cache(maxsize=4096)  # a group's members arrive together, and each is asked about twice
def parse(group_id: str) -> GroupId | None:
    """The id, if this text is the one way to write it."""
    try:
        id = GroupId.parse(group_id)
    except ValueError:
        return None
    return id if str(id) == group_id else None
