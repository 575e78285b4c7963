"""The service. Its map is in the package's docstring."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.clock import Clock
from asyncrl.config.schema import Config
from asyncrl.services.ledger_client import ledger_handlers
from asyncrl.services.message_queue.beginning import Beginning
from asyncrl.services.message_queue.recovery import Fresh, Recovery
from asyncrl.services.message_queue.settling import ROLLOUTS, SCORED
from asyncrl.services.service import NOWHERE, AddressBook, service_rpc
from asyncrl.services.tasks import first_to_end
from asyncrl.transport.broker import Broker

BIND = "tcp://127.0.0.1:*"


class MessageQueueService:
    """Hosts broker and ledger from `start` until `stop`; it has no end of its own, because others settle with it last.

    `run` raises when the ledger's file or the journal refuses, or the broker broke: without any of them the run cannot go on.
    `recovery` says how this process begins.
    """

    name = "message_queue"

    def __init__(self, config: Config, run_dir: Path, *, clock: Clock, bind: str = BIND, recovery: Recovery | None = None):
        self._config, self._clock, self._bind = config, clock, bind
        self._stop = asyncio.Event()
        self._state = "starting"
        self._beginning = Beginning(config, run_dir, recovery if recovery is not None else Fresh(), clock=clock)
        self._ledger = self._beginning.ledger
        self._rpc = service_rpc(self)
        self._broker: Broker

    async def start(self, earlier: Mapping[str, str] = NOWHERE) -> dict[str, str]:
        """Open the ledger and the journal where they stand, bind both sockets: ``rpc`` and ``broker``."""
        self._beginning.begin()
        life = 1 + secrets.randbelow(2**30)
        self._broker = Broker(self._beginning.queue.exchange, clock=self._clock, bind=self._bind, life=life)
        self._rpc.add(ledger_handlers(self._ledger, self._counts))
        self._rpc.add({"queue.unsettled": self.unsettled, "queue.stats": self._broker.stats})
        addresses = {"broker": await self._broker.start(earlier.get("broker")), "rpc": await self._rpc.start(earlier.get("rpc"))}
        self._state = "ready"
        return addresses

    async def run(self, book: AddressBook) -> None:
        self._state = "running"
        try:
            await first_to_end(self._stop.wait(), self._broker.watch(), self._ledger.until_failed())
            self._state = "stopped"
        finally:
            await self._broker.close()
            self._ledger.close()
            self._beginning.close()
            await self._rpc.close()

    async def stop(self) -> None:
        self._stop.set()

    def status(self) -> dict[str, Any]:
        stats = self._broker.stats()
        return {
            "state": self._state,
            "version": None,
            "steps": self._ledger.attempts.finished_steps,
            "journal_lost": self._beginning.num_lost,
            "depth": {topic: int(stats[topic]["depth"]) for topic in (ROLLOUTS, SCORED)},
            "samples": self._ledger.samples(),
        }

    def summary(self) -> dict[str, Any]:
        """`queue` and `samples` of summary.json."""
        stats = self._broker.stats()
        topics = {topic: stats[topic] for topic in (ROLLOUTS, SCORED)}
        return {
            "queue": {
                "capacity": self._config.queue.capacity,
                "max_depth": int(max(figures["max_depth"] for figures in topics.values())),
                "blocked_s": round(sum(figures["blocked_seconds"] for figures in topics.values()), 3),
                "topics": topics,
            },
            "samples": self._ledger.samples(),
        }

    def unsettled(self) -> dict[str, list[str]]:
        """Text ids of the groups that have unsettled messages, by topic, in order of acceptance; in `scored` also those that the
        trainer holds since before this process began."""
        queue = self._beginning.queue
        rollouts = dict.fromkeys(each.group_id for each in queue.exchange.unsettled(ROLLOUTS))
        return {ROLLOUTS: list(rollouts), SCORED: queue.queued()}

    def _counts(self) -> dict[str, Any]:
        attempts = self._ledger.attempts
        return {**self._ledger.samples(), "finished_steps": attempts.finished_steps, "final_version": attempts.final_version}
