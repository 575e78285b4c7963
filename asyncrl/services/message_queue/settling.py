"""What the queue and the ledger tell each other, without sockets: the service and the simulator both use it.

a scored group is accepted    → its attempt is queued, its trajectories are settled; only then can it be taken
an attempt ends               → its messages are settled in both topics
a message of an attempt that is not live arrives   → dropped as a duplicate
a message turns out to be none                     → its attempt has failed
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence

from asyncrl.config.schema import Config
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.messages import GroupId
from asyncrl.protocols import End
from asyncrl.transport.exchange import Exchange
from asyncrl.transport.topic import TopicSpec

ROLLOUTS, SCORED = "rollouts", "scored"
log = logging.getLogger(__name__)


def topics_of(config: Config) -> list[TopicSpec]:
    """The two topics, each with the capacity of the `queue` section and the one producer whose end is the topic's end."""
    capacity_bytes = int(config.queue.capacity_megabytes * 1e6)
    producers = {ROLLOUTS: "rollouter", SCORED: "reward"}
    return [TopicSpec(name, config.queue.capacity, capacity_bytes, (producer,)) for name, producer in producers.items()]


def connect(ledger: LocalLedgerClient, topics: Iterable[TopicSpec], *, lease_seconds: float) -> LedgerHooks:
    """An exchange (`.exchange`) whose messages live and end with the ledger's attempts."""
    hooks = LedgerHooks(ledger)
    hooks.exchange = Exchange(topics, lease_seconds=lease_seconds, hooks=hooks)
    ledger.on_end = hooks.settle
    return hooks


class LedgerHooks:
    """`QueueHooks` over a ledger."""

    exchange: Exchange

    def __init__(self, ledger: LocalLedgerClient):
        self._ledger = ledger

    def is_ended(self, group_id: str) -> bool:
        """Only a live attempt's messages are wanted; an id that is none belongs to no attempt."""
        id = _parse(group_id)
        return id is None or id not in self._ledger.attempts

    def on_accept(self, topic: str, accepted: Sequence[tuple[str, str]]) -> None:
        queued: dict[GroupId, None] = {}
        for message_id, group_id in accepted:
            id = _parse(group_id)
            assert id is not None, "what is accepted has not ended"
            if self._ledger.attempts.state(id) != "in_flight" or id in queued:
                self.exchange.settle(topic, (message_id,))  # a second copy, of a group whose scored group is here
            elif topic == SCORED:
                queued[id] = None
        if queued:
            self._ledger.queue(list(queued))
        for id in queued:
            self.exchange.settle_group(str(id), ROLLOUTS)

    def on_refused(self, topic: str, message_id: str, group_id: str, reason: str) -> None:
        log.warning("message %s of topic %s is no message: %s", message_id, topic, reason)
        id = _parse(group_id)
        if id is not None and id in self._ledger.attempts:
            self._ledger.cut_short([End(id, "failed", f"malformed message: {message_id} in {topic}: {reason}")])

    def settle(self, ended: Sequence[GroupId]) -> None:
        """These attempts have ended."""
        for id in ended:
            self.exchange.settle_group(str(id))


@functools.lru_cache(maxsize=4096)  # a group's members arrive together, and each is asked about twice
def _parse(group_id: str) -> GroupId | None:
    """The id, if this text is the one way to write it."""
    try:
        id = GroupId.parse(group_id)
    except ValueError:
        return None
    return id if str(id) == group_id else None
