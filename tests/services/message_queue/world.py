"""Queue, journal and ledger of one run over its files, driven by hand; a crash drops the objects and keeps the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.clock import SystemClock
from asyncrl.config.schema import Config
from asyncrl.ledger.record import FILE_NAME, read_ledger
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, PromptCursor, StepRecord
from asyncrl.services.message_queue import Fresh, Recovery
from asyncrl.services.message_queue.beginning import Beginning
from asyncrl.services.message_queue.settling import ROLLOUTS, SCORED
from asyncrl.transport.journal import SegmentJournal
from asyncrl.transport.records import Incoming

GROUP_SIZE = 2
PRODUCERS = {ROLLOUTS: "rollouter", SCORED: "reward"}


def config_of(durability: str = "process", checkpoint_every: int = 0, **queue: Any) -> Config:
    """A valid config around these choices; `checkpoint_every` is set past the refusal of what is not built."""
    config = Config.model_validate(
        {
            "model": {"path": "builtin/arithmetic"},
            "data": {"train": "builtin/arithmetic"},
            "rollout": {"group_size": GROUP_SIZE},
            "reward": {"functions": [{"function": "exact_match"}]},
            "queue": {"capacity": 1000, "durability": durability, **queue},
            "training": {"steps": 10, "groups_per_step": 2},
        }
    )
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": checkpoint_every})})


def id_of(row: int, attempt: int = 0) -> GroupId:
    return GroupId(0, row, attempt)


class Crash(Exception):
    """The process ends here."""


class QueueWorld:
    """`boot` begins a process, `crash` ends it as kill -9 does. All calls are made on a running loop."""

    def __init__(self, run_dir: Path, config: Config):
        self.run_dir, self.config = run_dir, config
        self.drawn = 0
        self.up = False

    def boot(self, recovery: Recovery | None = None) -> None:
        self.boot_bare(recovery)
        for topic, producer in PRODUCERS.items():
            self.exchange.topic(topic).open_sender(producer.encode(), producer, 0.0)

    def boot_bare(self, recovery: Recovery | None = None) -> None:
        """Without the two senders."""
        self.beginning = Beginning(self.config, self.run_dir, recovery or Fresh(), clock=SystemClock())
        self.beginning.begin()
        self.ledger = self.beginning.ledger
        self.exchange = self.beginning.queue.exchange
        self.sent = dict.fromkeys(PRODUCERS, 0)
        self.up = True

    def crash(self) -> None:
        if self.up:
            self.ledger._writer.abandon()
            self.beginning.close()
            self.up = False

    @property
    def attempts(self):
        return self.ledger.attempts

    @property
    def journal(self) -> SegmentJournal:
        return self.exchange.journal

    def record(self):
        return read_ledger(self.run_dir / FILE_NAME)

    async def dispatch(self, count: int) -> list[GroupId]:
        ids = [id_of(row) for row in range(self.drawn, self.drawn + count)]
        await self.ledger.dispatch([Dispatch(id, 0) for id in ids], PromptCursor(0, self.drawn + count, None, 0, False))
        self.drawn += count
        return ids

    def accept(self, topic: str, message_ids: list[str], size: int = 100) -> list[str]:
        """One write, as it is read in a wake-up; the accepted ids. `publish` must follow."""
        session = PRODUCERS[topic].encode()
        payloads = [payload_of(message_id, size) for message_id in message_ids]
        of = self.exchange.topic(topic)
        of.announce(session, self.sent[topic], list(map(len, payloads)), 0.0)
        of.grant(0.0)
        batch = [
            Incoming(message_id, "/".join(message_id.split("/")[:3]), payload)
            for message_id, payload in zip(message_ids, payloads, strict=True)
        ]
        result = self.exchange.accept(topic, session, self.sent[topic], batch, 0.0)
        assert not result.out_of_turn
        self.sent[topic] += len(batch)
        return [message_id for message_id, _ in result.accepted]

    def send(self, topic: str, message_ids: list[str], size: int = 100) -> list[str]:
        accepted = self.accept(topic, message_ids, size)
        self.exchange.publish()
        return accepted

    def take(self, topic: str, count: int = 1000) -> list[tuple[str, bool]]:
        """(id, redelivered) of what is taken; every payload is checked."""
        taken = self.exchange.take(topic, b"consumer", max_items=count, max_bytes=10**9, now=0.0)
        for each in taken:
            assert bytes(each.payload).startswith(each.message_id.encode() + b" ")
        return [(each.message_id, each.redelivered) for each in taken]

    def unsettled(self, topic: str) -> list[str]:
        return [each.message_id for each in self.exchange.unsettled(topic)]

    async def finish_step(self, ids: list[GroupId], state: str = "trained") -> None:
        """The trainer's line first, as the trainer does."""
        step = self.attempts.finished_steps + 1
        groups = [str(id) for id in ids] if state == "trained" else []
        with (self.run_dir / "batches.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "version": step - 1, "groups": groups, "token_versions": None}) + "\n")
        await self.ledger.finish_step(StepRecord(step, step - 1, tuple(End(id, state) for id in ids)))

    def cut_batches(self, step: int) -> None:
        path = self.run_dir / "batches.jsonl"
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
            path.write_text("".join(line + "\n" for line in lines))


def payload_of(message_id: str, size: int) -> bytes:
    """A payload that tells whose it is."""
    return (message_id.encode() + b" ").ljust(size, b".")
