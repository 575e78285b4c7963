"""The inference service: what it gives out, swaps through its receiver, and how it ends."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from asyncrl.engines.client import FleetClient, fixed_fleet
from asyncrl.engines.embedded import EngineOptions
from asyncrl.errors import RunError, UserError
from asyncrl.protocols import GenerateRequest, MemberRequest, PolicyVersion, SamplingParams
from asyncrl.services.inference import InferenceServer
from asyncrl.transport.rpc import RpcClient
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


class Receiver:
    """Stands for the weight receiver: hands its target out, and counts."""

    def __init__(self, target):
        self.target, self.closed, self.alive = target, 0, True

    def start(self, bind: str | None = None) -> str:
        return "tcp://weights"

    def close(self) -> None:
        self.closed += 1


def service(model, receivers: list[Receiver] | None = None) -> InferenceServer:
    def make(target) -> Receiver:
        made = Receiver(target)
        (receivers if receivers is not None else []).append(made)
        return made

    return InferenceServer("inference/0", model, EngineOptions(context_tokens=64, max_batch=4), make_receiver=make)


async def test_it_serves_swaps_reports_and_stops(model):
    receivers: list[Receiver] = []
    server = service(model, receivers)
    assert server.status() == {"state": "starting", "version": None}
    addresses = await server.start()
    assert sorted(addresses) == ["http", "rpc", "weights"]
    assert addresses["weights"] == "tcp://weights"
    running = asyncio.create_task(server.run({}))
    rpc, client = RpcClient(addresses["rpc"]), FleetClient(fixed_fleet({"inference/0": addresses["http"]}))
    target = receivers[0].target
    staged = {name: tensor.clone() for name, tensor in target.live().items()}
    await asyncio.to_thread(target.commit, staged, PolicyVersion(1, 3), "keep")
    request = GenerateRequest(np.asarray([4, 5], np.int32), (MemberRequest(0, "a", 1),), SamplingParams(5, ignore_eos=True), 20.0)
    (completion,) = [completion async for completions in client.generate(request) for completion in completions]
    assert completion.versions.tolist() == [3] * 5
    status = await rpc.call("status", timeout=5)
    assert (status["state"], status["version"], status["tokens"]) == ("serving", 3, 5)
    summary = await rpc.call("summary", timeout=5)
    assert summary["servers"]["inference/0"]["commits"] == 1
    await rpc.call("stop", timeout=5)
    await asyncio.wait_for(running, 10)
    assert receivers[0].closed == 1
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{addresses['http']}/health")
    await client.close()
    await rpc.close()


async def test_a_decode_loop_that_dies_ends_the_service_with_its_reason(model):
    receivers: list[Receiver] = []
    server = service(model, receivers)
    addresses = await server.start()
    running = asyncio.create_task(server.run({}))
    loop = receivers[0].target
    loop._runner.decode = None  # as if the model had raised
    client = FleetClient(fixed_fleet({"inference/0": addresses["http"]}))
    request = GenerateRequest(np.asarray([4, 5], np.int32), (MemberRequest(0, "a", 1),), SamplingParams(5), 1.0)
    (completion,) = [completion async for completions in client.generate(request) for completion in completions]
    assert re.search("after one was lost: server inference/0: .*the engine (has )?ended", completion.failure or "")
    with pytest.raises(RunError, match="decode loop ended"):
        await asyncio.wait_for(running, 10)
    await client.close()


async def test_a_weight_receiver_that_dies_ends_the_service_with_its_reason(model):
    receivers: list[Receiver] = []
    server = service(model, receivers)
    await server.start()
    running = asyncio.create_task(server.run({}))
    receivers[0].alive = False
    with pytest.raises(RunError, match="weight receiver ended"):
        await asyncio.wait_for(running, 10)


async def test_a_model_that_cannot_be_served_is_the_users_error(tmp_path):
    with pytest.raises(UserError):
        await service(tmp_path).start()


def test_serve_prints_its_address_and_ends_on_a_signal(model):
    code = f"from asyncrl.services.inference import serve; raise SystemExit(serve({str(model)!r}, port=0))"
    command = [sys.executable, "-W", "error", "-c", code]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        line = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        watchdog.cancel()
    assert "is served at http://127.0.0.1:" in line, errors
    assert (process.returncode, errors) == (0, "")
