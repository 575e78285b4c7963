"""An inference server's process, killed and started again at its old addresses while it generates: it is STALE until it has the
current weights, and what it was asked goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from asyncrl.clock import SystemClock
from asyncrl.engines.client import FleetClient
from asyncrl.protocols import Completion, FleetView, GenerateRequest, MemberRequest, SamplingParams
from asyncrl.services.parameter_sync.service import ParameterSyncService, SyncSettings
from asyncrl.services.tasks import cancel
from asyncrl.weight_sync.channel import staged_line
from asyncrl.weight_sync.fleet_client import RpcFleet
from asyncrl.weight_sync.publisher import ShmPublisher
from tests.models import tiny_model
from tests.waiting import until

SERVER = """
import asyncio, json, sys
from asyncrl.engines.embedded import EngineOptions
from asyncrl.services.inference import InferenceServer
from asyncrl.weight_sync.receiver import WeightReceiver

async def main():
    options = EngineOptions(context_tokens=256, batch_invariant=True)
    server = InferenceServer("inference/0", sys.argv[1], options, make_receiver=WeightReceiver)
    print(json.dumps(await server.start(json.loads(sys.argv[2]))), flush=True)
    await server.run({})

asyncio.run(main())
"""
SETTINGS = SyncSettings(heartbeat_seconds=0.05, silence_seconds=5.0, timeout_seconds=20.0)


class World:
    """A server in a process of its own, ParameterSync, a trainer that published version 7, and a rollouter's client."""

    def __init__(self, model: Path):
        self._model = model
        self._process: subprocess.Popen[str] | None = None
        self.addresses: dict[str, str] = {}
        self.views: list[FleetView] = []

    async def start(self) -> None:
        await self.start_server()
        self._sync = ParameterSyncService(SETTINGS, connect=staged_line, clock=SystemClock())
        address = (await self._sync.start())["rpc"]
        weights = AutoModelForCausalLM.from_pretrained(self._model)
        for parameter in weights.parameters():
            parameter.data.mul_(1.01)
        self._publisher = ShmPublisher(
            weights.named_parameters(), run_id="inferencerestarts", address=address, incarnation=1, bucket_bytes=1 << 20,
            timeout_seconds=20.0,
        )  # fmt: skip
        self.client, self._fleet = FleetClient(), RpcFleet(address)
        running = self._sync.run({"inference/0": self.addresses})
        self._tasks = [asyncio.create_task(running), asyncio.create_task(self._watch())]
        await asyncio.to_thread(self._publisher.register)
        await asyncio.to_thread(self._publisher.stage, 7, await asyncio.to_thread(self._publisher.acquire, 7))
        assert await asyncio.to_thread(self._publisher.wait_confirmed, 7, 20.0)

    async def start_server(self) -> None:
        """At the addresses that it had before, if it had any."""
        self.addresses = await asyncio.to_thread(self._start_process)

    def _start_process(self) -> dict[str, str]:
        command = [sys.executable, "-c", SERVER, str(self._model), json.dumps(self.addresses)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))

    def kill_server(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    async def _watch(self) -> None:
        while True:
            self.views.append(await self._fleet.watch(self.views[-1].seq if self.views else -1, 5.0))
            self.client.update(self.views[-1])

    async def close(self) -> None:
        self.kill_server()
        await self.client.close()
        await asyncio.to_thread(self._publisher.close)
        await cancel(self._tasks)
        await self._fleet.close()


@pytest.fixture
async def world(tmp_path, monkeypatch) -> AsyncIterator[World]:
    monkeypatch.setattr("asyncrl.engines.shared_call.CHUNK_TOKENS", 16)
    world = World(tiny_model(tmp_path))
    try:
        await world.start()
        yield world
    finally:
        await world.close()


async def ask(world: World) -> list[Completion]:
    members = tuple(MemberRequest(index, f"0/1/0/{index}", index) for index in range(4))
    sampling = SamplingParams(200, top_p=0.9, ignore_eos=True)
    request = GenerateRequest(np.asarray([4, 13, 5], np.int32), members, sampling, 120.0)
    completions = [completion async for completions in world.client.generate(request) for completion in completions]
    return sorted(completions, key=lambda completion: completion.index)


async def tokens_so_far(world: World) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{world.addresses['http']}/server_info") as response:
        return int((await response.json())["generated_tokens"])


async def test_a_killed_server_comes_back_stale_and_its_requests_end_as_if_undisturbed(world):
    calm = await ask(world)
    already, known = await tokens_so_far(world), dict(world.addresses)
    asked = asyncio.create_task(ask(world))

    async def is_under_way() -> bool:
        return await tokens_so_far(world) > already + 4 * 40

    await until(is_under_way, 60)
    seen = len(world.views)
    await asyncio.to_thread(world.kill_server)
    assert not asked.done()
    await world.start_server()
    assert world.addresses == known
    disturbed = await asked
    assert "STALE" in [view.servers[0].state for view in world.views[seen:]]
    for one, other in zip(calm, disturbed, strict=True):
        assert other.failure is None
        assert np.array_equal(one.token_ids, other.token_ids)
        assert one.log_probs.tobytes() == other.log_probs.tobytes()
        assert other.versions.tolist() == [7] * 200
    assert (world.views[-1].confirmed, world.views[-1].servers[0].state) == (7, "READY")
