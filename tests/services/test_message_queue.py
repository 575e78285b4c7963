"""The message_queue service over real sockets: queue and ledger never disagree, and a live run can be audited in motion."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.schema import Config
from asyncrl.errors import DeadlineExceeded, LedgerError
from asyncrl.ledger.audit import audit
from asyncrl.ledger.store import FILE_NAME, LedgerWriter, read_samples
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, PromptCursor, StepRecord
from asyncrl.services.ledger_client import RpcLedgerClient
from asyncrl.services.live_witness import RpcLiveWitness
from asyncrl.services.message_queue import MessageQueueService, topics_of
from asyncrl.transport.client import QueueReceiver, QueueSender
from asyncrl.transport.rpc import RpcClient, RpcServer
from tests.ledger.conftest import SmallRun
from tests.messages.samples import scored_group, trajectory

GROUP_SIZE = 2


def config_with(capacity=8):
    return Config.model_validate(
        {
            "model": {"path": "builtin/arithmetic"},
            "data": {"train": "builtin/arithmetic"},
            "rollout": {"group_size": GROUP_SIZE},
            "reward": {"functions": [{"function": "exact_match"}]},
            "queue": {"capacity": capacity},
            "training": {"steps": 10, "groups_per_step": 2},
        }
    )


class Parts:
    """The service and the sockets of everybody around it."""

    def __init__(self, service, addresses):
        self.service, self.addresses = service, addresses
        broker = addresses["broker"]
        self.rpc = RpcClient(addresses["rpc"])
        self.ledger = RpcLedgerClient(self.rpc)
        self.rollouts_in = QueueSender(broker, "rollouts", producer="rollouter")
        self.rollouts_out = QueueReceiver(broker, "rollouts")
        self.scored_in = QueueSender(broker, "scored", producer="reward")
        self.scored_out = QueueReceiver(broker, "scored")

    async def ask(self, method, **params):
        return await self.rpc.call(method, timeout=10, **params)

    async def dispatch(self, *rows):
        cursor = PromptCursor(0, max(rows) + 1, None, 0, False)
        await self.ledger.dispatch([Dispatch(GroupId(0, row, 0), 0) for row in rows], cursor)

    async def close(self):
        for end in (self.rollouts_out, self.scored_out):
            await end.close()
        self.rollouts_in.abandon()
        self.scored_in.abandon()
        await self.rpc.close()


@asynccontextmanager
async def serving(run_dir: Path, **config):
    service = MessageQueueService(config_with(**config), run_dir, clock=SystemClock())
    parts = Parts(service, await service.start())
    run = asyncio.ensure_future(service.run({}))
    try:
        yield parts
        await parts.close()
    finally:
        await service.stop()
        async with asyncio.timeout(10):
            await run


async def take(receiver, number):
    taken = []
    async with asyncio.timeout(10):
        while len(taken) < number:
            taken += [delivery.message for delivery in await receiver.receive(max_items=number, timeout=5)]
    return taken


async def test_a_group_goes_through_both_topics_and_leaves_nothing_behind(tmp_path):
    async with serving(tmp_path) as parts:
        await parts.dispatch(0)
        await parts.rollouts_in.send([trajectory(0, member, group_size=GROUP_SIZE) for member in range(GROUP_SIZE)])
        assert await parts.ask("queue.unsettled") == {"rollouts": ["0/0/0"], "scored": []}
        await take(parts.rollouts_out, GROUP_SIZE)
        await parts.scored_in.send([scored_group(0)])
        assert await parts.ask("queue.unsettled") == {"rollouts": [], "scored": ["0/0/0"]}
        assert [group.state for group in await parts.ledger.live()] == ["queued"]
        (group,) = await take(parts.scored_out, 1)
        assert await parts.ask("queue.unsettled") == {"rollouts": [], "scored": ["0/0/0"]}
        await parts.ledger.finish_step(StepRecord(1, 0, (End(group.id, "trained"),)))
        assert await parts.ask("queue.unsettled") == {"rollouts": [], "scored": []}
        assert (await parts.ledger.counts())["trained"] == 1


async def test_a_message_of_a_group_that_has_ended_is_dropped_and_counted(tmp_path):
    async with serving(tmp_path) as parts:
        await parts.dispatch(0)
        await parts.ledger.end([End(GroupId(0, 0, 0), "failed", "lost")])
        await parts.rollouts_in.send([trajectory(0, 0)])
        await parts.scored_in.send([scored_group(0)])
        stats = await parts.ask("queue.stats")
        assert [stats[topic]["duplicates"] for topic in ("rollouts", "scored")] == [1, 1]
        assert await parts.ask("queue.unsettled") == {"rollouts": [], "scored": []}


async def test_an_end_makes_room_for_a_sender_that_waits(tmp_path):
    async with serving(tmp_path, capacity=2) as parts:
        await parts.dispatch(0, 1)
        await parts.rollouts_in.send([trajectory(0, member) for member in range(2)])
        blocked = asyncio.ensure_future(parts.rollouts_in.send([trajectory(1, 0)]))
        async with asyncio.timeout(10):
            while not (await parts.ask("queue.stats"))["rollouts"]["blocked_seconds"]:  # noqa: ASYNC110 (another process, as it were)
                await asyncio.sleep(0.002)
        assert not blocked.done()
        await parts.ledger.end([End(GroupId(0, 0, 0), "failed", "lost")])
        async with asyncio.timeout(10):
            await blocked


async def test_status_and_summary_have_the_shape_that_is_promised(tmp_path):
    async with serving(tmp_path) as parts:
        await parts.dispatch(0, 1)
        await parts.rollouts_in.send([trajectory(0, 0)])
        await parts.ledger.end([End(GroupId(0, 1, 0), "failed", "too few scored: 0 of 2")])
        status = await parts.ask("status")
        assert (status["name"], status["state"], status["version"]) == ("message_queue", "running", None)
        summary = await parts.ask("summary")
        assert summary["samples"] == {
            "dispatched": 2, "trained": 0, "filtered": 0, "failed": 1, "expired": 0, "in_flight": 1, "queued": 0,
            "reasons": {"failed: too few scored": 1},
        }  # fmt: skip
        assert summary["queue"]["capacity"] == 8
        assert summary["queue"]["max_depth"] == 1
        assert set(summary["queue"]["topics"]) == {"rollouts", "scored"}
        assert summary["queue"]["blocked_s"] == 0.0


async def test_stop_ends_the_service_with_everything_written(tmp_path):
    service = MessageQueueService(config_with(), tmp_path, clock=SystemClock())
    parts = Parts(service, await service.start())
    run = asyncio.ensure_future(service.run({}))
    await parts.dispatch(0, 1, 2)
    await parts.ask("stop")
    async with asyncio.timeout(10):
        await run
    await parts.close()
    assert read_samples(tmp_path)["in_flight"] == 3
    assert service.summary()["samples"]["in_flight"] == 3
    assert not (tmp_path / f"{FILE_NAME}-wal").exists()


async def test_a_ledger_file_that_refuses_ends_the_service_by_its_reason(tmp_path, monkeypatch):
    def refuse(self):
        raise LedgerError("the disk is full")

    service = MessageQueueService(config_with(), tmp_path, clock=SystemClock())
    parts = Parts(service, await service.start())
    run = asyncio.ensure_future(service.run({}))
    monkeypatch.setattr(LedgerWriter, "flush", refuse)
    with pytest.raises(LedgerError, match="the disk is full"):
        await parts.dispatch(0)
    with pytest.raises(LedgerError, match="the disk is full"):
        async with asyncio.timeout(10):
            await run
    parts.rollouts_in.abandon()
    parts.scored_in.abandon()
    await parts.rpc.close()
    monkeypatch.undo()


async def test_a_live_run_is_audited_while_its_groups_move(tmp_path):
    """A small run in full motion: rollouter, reward and trainer as three loops, the audit in a thread beside them."""
    flying, scoring = set(), set()
    holders = [RpcServer({"in_flight": lambda held=held: [str(id) for id in held]}) for held in (flying, scoring)]
    addresses = [await holder.start() for holder in holders]
    over = asyncio.Event()

    async def rollouter(parts):
        row = 0
        while not over.is_set():
            id = GroupId(0, row, 0)
            flying.add(id)
            await parts.dispatch(row)
            await parts.rollouts_in.send([trajectory(row, member, group_size=GROUP_SIZE) for member in range(GROUP_SIZE)])
            flying.discard(id)
            row += 1
        await parts.rollouts_in.close()

    async def reward(parts):
        while not over.is_set():
            for message in await take(parts.rollouts_out, GROUP_SIZE):
                scoring.add(message.id.group)
                if message.id.member == GROUP_SIZE - 1:
                    await parts.scored_in.send([scored_group(message.id.row)])
                    scoring.discard(message.id.group)

    async def trainer(parts):
        recorder = SmallRun.write_batch
        step = 0
        while not over.is_set():
            groups, step = await take(parts.scored_out, 2), step + 1
            record = StepRecord(step, step - 1, tuple(End(group.id, "trained") for group in groups))
            recorder(parts, record)
            await parts.ledger.finish_step(record)

    async with serving(tmp_path) as parts:
        parts.run_dir = tmp_path
        loops = [asyncio.ensure_future(loop(parts)) for loop in (rollouter, reward, trainer)]
        witness = RpcLiveWitness(rollouter=addresses[0], reward=addresses[1], message_queue=parts.addresses["rpc"])
        for _ in range(3):
            report = await asyncio.to_thread(audit, tmp_path, witness)
            assert report.ok, report.to_text()
            assert report.live
            assert report.balanced
        lost = GroupId(0, 10_000_000, 0)
        flying.add(lost)
        report = await asyncio.to_thread(audit, tmp_path, witness, patience=0.5)
        assert {finding.subject for finding in report.findings} == {str(lost)}
        over.set()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        for holder in holders:
            await holder.close()
    report = audit(tmp_path)
    assert report.ok, report.to_text()
    assert report.counts["trained"] > 10


def test_a_witness_says_so_when_a_part_does_not_answer():
    nobody = "tcp://127.0.0.1:1"
    witness = RpcLiveWitness(rollouter=nobody, reward=nobody, message_queue=nobody, timeout=0.05)
    with pytest.raises(DeadlineExceeded):
        witness.in_flight()


def test_each_topic_has_the_configured_capacity_and_ends_with_its_one_producer():
    rollouts, scored = topics_of(config_with(capacity=16))
    assert (rollouts.name, rollouts.producers, scored.name, scored.producers) == (
        "rollouts",
        ("rollouter",),
        "scored",
        ("reward",),
    )
    assert (rollouts.capacity_items, scored.capacity_items, scored.capacity_bytes) == (16, 16, 256_000_000)
