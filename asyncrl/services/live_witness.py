"""The parts of a live run, asked for the audit: `asyncrl.ledger.audit.LiveWitness` over blocking remote calls."""

from __future__ import annotations

from asyncrl.messages import GroupId
from asyncrl.transport.rpc import call_once

ANSWER_SECONDS = 2.0


class RpcLiveWitness:
    """rollouter and reward answer ``in_flight`` with text ids of groups; message_queue answers ``queue.unsettled``.

    Raises TransportError when one of them does not answer within `timeout` seconds.
    """

    def __init__(self, *, rollouter: str, reward: str, message_queue: str, timeout: float = ANSWER_SECONDS):
        self._holders = (rollouter, reward)
        self._queue = message_queue
        self._timeout = timeout

    def in_flight(self) -> set[GroupId]:
        """Upstream first: a group that moves on between two questions is seen twice rather than not at all."""
        ids = {id for address in self._holders for id in call_once(address, "in_flight", timeout=self._timeout)}
        ids.update(self._unsettled("rollouts"))
        return {GroupId.parse(id) for id in ids}

    def queued(self) -> set[GroupId]:
        return {GroupId.parse(id) for id in self._unsettled("scored")}

    def _unsettled(self, topic: str) -> list[str]:
        ids: list[str] = call_once(self._queue, "queue.unsettled", timeout=self._timeout)[topic]
        return ids
