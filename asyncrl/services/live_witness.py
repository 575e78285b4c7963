"""The parts of a live run, asked for the audit: `asyncrl.ledger.audit.LiveWitness` over blocking remote calls."""

from __future__ import annotations

from typing import Any

from asyncrl.messages import GroupId
from asyncrl.transport.rpc import call_once
from asyncrl.transport.security import Door

ANSWER_SECONDS = 2.0


class RpcLiveWitness:
    """rollouter and reward answer ``in_flight`` with text ids of groups; message_queue answers ``queue.unsettled``.

    Raises TransportError when one of them does not answer within `timeout` seconds.
    """

    def __init__(
        self, *, rollouter: str, reward: str, message_queue: str, timeout: float = ANSWER_SECONDS, door: Door | None = None
    ):
        """door: to the run, where it is not this process's."""
        self._holders = (rollouter, reward)
        self._queue = message_queue
        self._timeout, self._door = timeout, door

    def in_flight(self) -> set[GroupId]:
        """Upstream first: a group that moves on between two questions is seen twice rather than not at all."""
        ids = {id for address in self._holders for id in self._ask(address, "in_flight")}
        ids.update(self._unsettled("rollouts"))
        return {GroupId.parse(id) for id in ids}

    def queued(self) -> set[GroupId]:
        return {GroupId.parse(id) for id in self._unsettled("scored")}

    def _unsettled(self, topic: str) -> list[str]:
        ids: list[str] = self._ask(self._queue, "queue.unsettled")[topic]
        return ids

    def _ask(self, address: str, method: str) -> Any:
        return call_once(address, method, timeout=self._timeout, door=self._door)
