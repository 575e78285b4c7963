"""Processes that are killed with -9 at random moments and started again: each prompt trains once, and the audit is clean."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.errors import StreamClosed
from asyncrl.ledger.audit import audit
from asyncrl.messages import GroupId
from asyncrl.protocols import End, StepRecord
from asyncrl.transport.client import QueueReceiver
from tests.services.message_queue.parts import BEAT_SECONDS, ROWS, ledger_at

ROOT = Path(__file__).parents[3]
PER_STEP = 4
pytestmark = pytest.mark.timeout(180)


class SmallPipeline:
    """The processes, and the trainer in this one. `train` ends with the data; `killing` kills and restarts meanwhile."""

    def __init__(self, run_dir: Path, durability: str, seed: int):
        self.run_dir, self.durability = run_dir, durability
        self.random = random.Random(seed)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.addresses: dict[str, str] = {}
        self.pool: dict[GroupId, None] = {}
        self.seen: set[GroupId] = set()
        self.step = self.checkpoint = self.incarnation = 0
        self.kills = dict.fromkeys(("queue", "rollouter", "front", "trainer"), 0)

    async def start(self, role: str, *arguments: str) -> None:
        command = [sys.executable, "-W", "error", "-m", "tests.services.message_queue.parts", role, *arguments]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        self.processes[role] = process
        if role == "queue":
            self.addresses = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))

    async def start_queue(self, *how: object) -> None:
        await self.start("queue", str(self.run_dir), self.durability, json.dumps(how), json.dumps(self.addresses))

    async def start_ends(self, *roles: str) -> None:
        for role in roles:
            await self.start(role, json.dumps(self.addresses))

    async def kill(self, *roles: str) -> None:
        for role in roles:
            process = self.processes.pop(role)
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.wait()

    async def train(self) -> None:
        """Groups in, steps out; a copy is dropped by its id. A checkpoint every third step."""
        ledger, client = ledger_at(self.addresses["rpc"])
        receiver = QueueReceiver(self.addresses["broker"], "scored", consumer="trainer", heartbeat_seconds=BEAT_SECONDS)
        try:
            while True:
                for delivery in await receiver.receive(max_items=PER_STEP, timeout=5):
                    if delivery.message.id not in self.seen:
                        self.seen.add(delivery.message.id)
                        self.pool[delivery.message.id] = None
                while len(self.pool) >= PER_STEP:
                    await self.train_step(ledger, list(self.pool)[:PER_STEP])
                    if self.step % 3 == 0:
                        await ledger.checkpointed(self.step)
                        self.checkpoint = self.step
        except StreamClosed:
            await self.train_step(ledger, list(self.pool))
            await ledger.finish_training(self.step)
        finally:
            receiver.abandon()
            await client.close()

    async def train_step(self, ledger, ids: list[GroupId]) -> None:
        step = self.step + 1
        line = {"step": step, "version": self.step, "groups": list(map(str, ids)), "token_versions": None}
        with (self.run_dir / "batches.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        await ledger.finish_step(StepRecord(step, self.step, tuple(End(id, "trained") for id in ids)))
        self.step = step
        for id in ids:
            self.pool.pop(id, None)

    def cut(self, step: int) -> None:
        path = self.run_dir / "batches.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= step))

    async def lose(self, role: str) -> None:
        """As the supervisor does: who is killed is started again, and with him who cannot go on without."""
        self.kills[role] += 1
        await self.kill(role)
        if role != "queue":
            await self.start_ends(role)
        elif self.durability == "none":
            held = list(map(str, self.pool))
            await self.kill("rollouter", "front")
            await self.start_queue("restarted", *held)
            await self.start_ends("rollouter", "front")
        else:
            await self.start_queue("restarted")

    async def lose_trainer(self, training: asyncio.Task[None]) -> asyncio.Task[None]:
        """All go back to the checkpoint."""
        self.kills["trainer"] += 1
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await self.kill("queue", "rollouter", "front")
        self.incarnation += 1
        self.cut(self.checkpoint)
        self.step, self.pool, self.seen = self.checkpoint, {}, set()
        await self.start_queue("set_back", self.step, self.incarnation)
        await self.start_ends("rollouter", "front")
        return asyncio.ensure_future(self.train())

    async def progress(self, training: asyncio.Task[None]) -> None:
        """Until a step is made, most of the time, and some random moment more."""
        before, moment = self.step, self.random.uniform(0.0, 0.4)
        deadline = asyncio.get_running_loop().time() + self.random.choice([0.3, 10, 10])
        while self.step == before and not training.done() and asyncio.get_running_loop().time() < deadline:
            await asyncio.wait([training], timeout=0.02)
        await asyncio.wait([training], timeout=moment)

    async def run(self, roles: Sequence[str]) -> None:
        """Kill these, one after the other."""
        await self.start_queue("fresh")
        await self.start_ends("rollouter", "front")
        training = asyncio.ensure_future(self.train())
        try:
            for role in roles:
                await self.progress(training)
                if training.done():
                    break
                if role == "trainer":
                    training = await self.lose_trainer(training)
                else:
                    await self.lose(role)
            await asyncio.wait_for(training, 100)
            report = audit(self.run_dir)
            assert report.ok, report.to_text()
        finally:
            training.cancel()
            await self.kill(*self.processes)


def trained(run_dir: Path) -> list[str]:
    lines = [json.loads(line) for line in (run_dir / "batches.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [id for line in lines for id in line["groups"]]


@pytest.mark.parametrize("durability", ["process", "power", "none"])
async def test_every_prompt_trains_once_whoever_is_killed(tmp_path, durability):
    pipeline = SmallPipeline(tmp_path, durability, seed=7)
    await pipeline.run(("queue", "front", "rollouter", "trainer", "queue"))
    assert sorted(trained(tmp_path)) == sorted(f"0/{row}/0" for row in range(ROWS))
    assert min(pipeline.kills.values()) >= 1


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("durability", ["process", "power", "none"])
@pytest.mark.parametrize("seed", range(8))
async def test_every_prompt_trains_once_whoever_is_killed_at_length(tmp_path, durability, seed):
    pipeline = SmallPipeline(tmp_path, durability, seed)
    await pipeline.run(pipeline.random.choices(("queue", "queue", "rollouter", "front", "trainer"), k=30))
    assert sorted(trained(tmp_path)) == sorted(f"0/{row}/0" for row in range(ROWS))
