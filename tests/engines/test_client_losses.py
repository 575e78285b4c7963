"""Servers that die while they generate: requests go on elsewhere with the tokens they have, and nobody sees the difference."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from asyncrl.engines import client as client_module
from asyncrl.engines.client import MAX_LOSSES, FleetClient, fixed_fleet
from asyncrl.engines.embedded import EmbeddedServer, EngineOptions
from asyncrl.protocols import Completion, FleetView, GenerateRequest, MemberRequest, SamplingParams, ServerView
from asyncrl.transport.ports import free_port
from tests.models import tiny_model
from tests.waiting import until

PROMPT = (4, 13, 5)
LENGTH = 7


def token(seed: int, place: int) -> int:
    return (seed * 31 + place * 7) % 64


class MortalServer:
    """Answers as the embedded engine does, a chunk a token; every token depends on seed and place alone. The next calls end as
    `deaths` says: after so many tokens of each member the connection breaks, or with an HTTP status; then it answers in full."""

    def __init__(self, version: str = "1.5", *, knows_offset: bool = True):
        self.version, self.knows_offset = version, knows_offset
        self.deaths: list[int | str] = []
        self.calls: list[dict] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        death = self.deaths.pop(0) if self.deaths else None
        if isinstance(death, str):
            return web.json_response({"error": death}, status=int(death))
        response = web.StreamResponse()
        await response.prepare(request)
        for place in range(max(params["max_new_tokens"] for params in body["sampling_params"])):
            if place == death:
                break
            for index, params in enumerate(body["sampling_params"]):
                await response.write(self._chunk(body, index, params, place))
            await self.hold.wait()
        if death is not None:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chunk(self, body: dict, index: int, params: dict, place: int) -> bytes:
        if place >= params["max_new_tokens"]:
            return b""
        offset = params.get("seed_offset", 0) if self.knows_offset else len(body["input_ids"][index]) - len(PROMPT)
        assert self.knows_offset or "seed_offset" not in params
        ids = [token(params["sampling_seed"], offset + i) for i in range(place + 1)]
        told = place if body.get("incremental") else 0
        is_last = place + 1 == params["max_new_tokens"]
        meta = {
            "finish_reason": {"type": "length", "length": place + 1} if is_last else None,
            "completion_tokens": place + 1,
            "output_token_logprobs": [[-one / 64, one, None] for one in ids[told:]],
            "weight_version": self.version,
        }
        if self.knows_offset or is_last:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": place + 1}]
        return b"data: %b\n\n" % json.dumps({"index": index, "output_ids": ids[told:], "meta_info": meta}).encode()

    async def abort(self, request: web.Request) -> web.Response:
        return web.Response()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[MortalServer]:
        app = web.Application()
        app.add_routes([web.post("/generate", self.generate), web.post("/abort_request", self.abort)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*runner.addresses[0])
        yield self
        await runner.cleanup()


def view(*servers: MortalServer, states: str | tuple[str, ...] = "READY", incarnation: int = 1) -> FleetView:
    states = (states,) * len(servers) if isinstance(states, str) else states
    views = [ServerView(f"inference/{i}", one.url, states[i], 5) for i, one in enumerate(servers)]
    return FleetView(1, incarnation, 5, 5, tuple(views))


def group(*, members: int = 2, length: int = LENGTH, seed: int = 0, timeout: float = 20.0) -> GenerateRequest:
    wanted = tuple(MemberRequest(index, f"0/1/0/{index}-{seed}", seed + index) for index in range(members))
    return GenerateRequest(np.asarray(PROMPT, np.int32), wanted, SamplingParams(length), timeout)


async def collect(client: FleetClient, request: GenerateRequest) -> list[Completion]:
    """In the order of the members; each came once."""
    completions = [completion async for completions in client.generate(request) for completion in completions]
    assert sorted(completion.index for completion in completions) == [member.index for member in request.members]
    return sorted(completions, key=lambda completion: completion.index)


def assert_whole(completions: list[Completion], request: GenerateRequest, version: int = 5) -> None:
    length = request.sampling.max_new_tokens
    for member, completion in zip(request.members, completions, strict=True):
        assert completion.failure is None
        ids = [token(member.seed, place) for place in range(length)]
        assert completion.token_ids.tolist() == ids
        assert np.array_equal(completion.log_probs, np.asarray([-one / 64 for one in ids], np.float32))
        assert completion.versions.tolist() == [version] * length
        assert completion.finish_reason == "length"


@pytest.fixture
async def one() -> AsyncIterator[MortalServer]:
    async with MortalServer().serving() as server:
        yield server


@pytest.fixture
async def other() -> AsyncIterator[MortalServer]:
    async with MortalServer().serving() as server:
        yield server


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch) -> None:
    """So that the short responses here travel as long ones do."""
    monkeypatch.setattr("asyncrl.engines.shared_call.CHUNK_TOKENS", 2)


@pytest.mark.parametrize("is_embedded", [True, False], ids=["embedded", "sglang"])
@pytest.mark.parametrize("place", range(LENGTH + 1))
async def test_a_server_that_dies_at_any_token_leaves_the_same_response(one, place, is_embedded):
    one.deaths, one.knows_offset = [place], is_embedded
    client, request = FleetClient(view(one), is_embedded=is_embedded), group(members=3)
    assert_whole(await collect(client, request), request)
    await client.close()


async def test_the_rest_is_asked_for_with_what_is_there_and_the_callers_parameters_untouched(one):
    one.deaths = [3]
    client, request = FleetClient(view(one)), group(members=1, seed=9)
    await collect(client, request)
    first, second = one.calls
    assert first["input_ids"] == [list(PROMPT)]
    assert second["input_ids"] == [[*PROMPT, *(token(9, place) for place in range(3))]]
    params = second["sampling_params"][0]
    assert (params["max_new_tokens"], params["seed_offset"], params["sampling_seed"]) == (LENGTH - 3, 3, 9)
    assert all(call["rid"][0].startswith("0/1/0/0-9~") for call in one.calls)
    assert first["rid"] != second["rid"]
    assert request.sampling == SamplingParams(LENGTH)
    await client.close()


async def test_any_history_of_deaths_gives_whole_responses(one, other):
    """Property over drawn histories: two servers, four groups at once, deaths anywhere."""
    client = FleetClient(view(one, other))
    draw = np.random.default_rng(0)
    for _ in range(15):
        one.deaths = [int(place) for place in draw.integers(0, LENGTH, draw.integers(0, 3))]
        other.deaths = [int(place) for place in draw.integers(1, LENGTH, draw.integers(0, 3))]
        requests = [group(seed=10 * number) for number in range(4)]
        for request, completions in zip(requests, await asyncio.gather(*(collect(client, r) for r in requests)), strict=True):
            assert_whole(completions, request)
    assert not any(client._load.values())
    await client.close()


async def test_members_that_finished_are_not_asked_for_again(one):
    client = FleetClient(view(one))
    one.deaths = [3]
    short, long = group(length=2), group(length=6, seed=50)
    done = await asyncio.gather(collect(client, short), collect(client, long))
    assert_whole(done[0], short)
    assert_whole(done[1], long)
    assert [len(call["rid"]) for call in one.calls] == [4, 2]
    await client.close()


async def test_a_server_that_says_5xx_is_lost_and_one_that_says_4xx_has_refused(one, other):
    client = FleetClient(view(one))
    one.deaths = ["503", "500"]
    request = group()
    assert_whole(await collect(client, request), request)
    one.deaths = ["404"]
    assert all("HTTP 404" in (completion.failure or "") for completion in await collect(client, group()))
    await client.close()


async def test_what_a_dead_server_had_waits_for_one_that_takes_traffic(one, other):
    client = FleetClient(view(one, other, states=("READY", "STALE")))
    one.hold.clear()
    request = group()
    waiting = asyncio.create_task(collect(client, request))
    await until(lambda: one.calls)
    client.update(view(one, other, states=("DEAD", "STALE")))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    assert not other.calls
    client.update(view(one, other, states=("DEAD", "READY")))
    assert_whole(await waiting, request)
    assert other.calls[0]["sampling_params"][0]["seed_offset"] == 1
    one.hold.set()
    await client.close()


async def test_a_server_that_goes_stale_or_updates_keeps_what_it_has(one):
    client = FleetClient(view(one))
    one.hold.clear()
    request = group()
    waiting = asyncio.create_task(collect(client, request))
    await until(lambda: one.calls)
    for state in ("UPDATING", "STALE", "STARTING"):
        client.update(view(one, states=state))
    client.update(replace(view(one), servers=()))
    one.hold.set()
    assert_whole(await waiting, request)
    assert len(one.calls) == 1
    await client.close()


async def test_a_server_that_comes_back_elsewhere_has_lost_what_it_had(one, other):
    client = FleetClient(view(one))
    one.hold.clear()
    request = group()
    waiting = asyncio.create_task(collect(client, request))
    await until(lambda: one.calls)
    client.update(view(other))
    assert_whole(await waiting, request)
    assert len(other.calls) == 1
    one.hold.set()
    await client.close()


async def test_a_server_restarted_with_weights_of_no_training_is_not_believed(one, other):
    one.version = "default"
    client = FleetClient(view(one, other))
    one.deaths = [2]
    requests = [group(seed=10 * number) for number in range(3)]
    for request, completions in zip(requests, await asyncio.gather(*(collect(client, r) for r in requests)), strict=True):
        assert_whole(completions, request)
    await client.close()


async def test_a_server_that_stays_away_fails_the_request_at_its_own_deadline_and_is_asked_seldom(one, monkeypatch):
    client = FleetClient(view(one))
    one.deaths = ["503"] * 1000
    began = asyncio.get_running_loop().time()
    completions = await collect(client, group(timeout=1.0))
    assert 1.0 <= asyncio.get_running_loop().time() - began < 3
    assert all("within 1 s, after one was lost: server inference/0: HTTP 503" in (c.failure or "") for c in completions)
    assert len(one.calls) < 10
    await client.close()


async def test_a_request_that_kills_every_server_is_given_up(one):
    client = FleetClient(view(one))
    one.deaths = [0] * 1000
    completions = await collect(client, group(timeout=60.0))
    assert all(f"{MAX_LOSSES} servers were lost in a row" in (completion.failure or "") for completion in completions)
    await client.close()


async def test_a_death_is_logged_once_however_many_requests_it_hits(one, other, caplog):
    client = FleetClient(view(one, other))
    one.deaths = [1, 1]
    with caplog.at_level(logging.WARNING, client_module.__name__):
        await asyncio.gather(*(collect(client, group(seed=10 * number)) for number in range(6)))
    assert len([record for record in caplog.records if "was lost" in record.message]) == 1
    await client.close()


async def test_abort_ends_what_waits_for_a_server(one):
    client = FleetClient(view(one, states="STALE"))
    request = group()
    waiting = asyncio.create_task(collect(client, request))
    await asyncio.sleep(0.01)
    await client.abort([request.members[0].rid])
    await asyncio.sleep(0.01)
    client.update(view(one))
    first, second = await waiting
    assert (first.finish_reason, second.failure) == ("abort", None)
    assert [len(call["rid"]) for call in one.calls] == [1]
    assert one.calls[0]["rid"][0].startswith(request.members[1].rid)
    await client.close()


async def test_what_was_aborted_goes_on_nowhere_when_its_server_is_lost(one, other):
    client = FleetClient(view(one, other, states=("READY", "STALE")))
    one.hold.clear()
    request = group()
    waiting = asyncio.create_task(collect(client, request))
    await until(lambda: one.calls)
    await client.abort([member.rid for member in request.members])
    client.update(view(one, other, states=("DEAD", "READY")))
    assert [completion.finish_reason for completion in await waiting] == ["abort", "abort"]
    assert not other.calls
    one.hold.set()
    await client.close()


async def test_a_closed_client_leaves_nobody_waiting_for_a_server(one):
    client = FleetClient(view(one, states="STALE"))
    waiting = asyncio.create_task(collect(client, group()))
    await asyncio.sleep(0.01)
    await client.close()
    assert all(completion.failure == "the client was closed" for completion in await waiting)


# ---- real servers, killed


SERVE = """
import asyncio, sys
from asyncrl.engines.embedded import EmbeddedServer, EngineOptions

async def main():
    server = EmbeddedServer(sys.argv[1], EngineOptions(context_tokens=256, batch_invariant=True))
    print(await server.start("127.0.0.1", int(sys.argv[2])), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Child:
    """A server of its own process, at an address that stays."""

    def __init__(self, model):
        self._command = [sys.executable, "-c", SERVE, str(model), str(free_port("127.0.0.1"))]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


async def generated(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/server_info") as response:
        return int((await response.json())["generated_tokens"])


async def test_a_server_killed_twice_and_restarted_leaves_the_response_of_an_undisturbed_one_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.engines.shared_call.CHUNK_TOKENS", 16)
    model, child = tiny_model(tmp_path), Child(tmp_path)
    sampling = SamplingParams(200, temperature=1.0, top_p=0.9, top_k=40, ignore_eos=True)
    request = replace(group(members=6, timeout=120.0), sampling=sampling)
    undisturbed = EmbeddedServer(model, EngineOptions(context_tokens=256, batch_invariant=True))
    reference = FleetClient(fixed_fleet({"calm": await undisturbed.start()}))
    wanted = await collect(reference, request)
    url = await asyncio.to_thread(child.start)
    client = FleetClient(fixed_fleet({"inference/0": url}))
    try:
        running = asyncio.create_task(collect(client, request))
        for _ in range(2):
            await until(lambda: generated_past(url, 6 * 40), 60)
            await asyncio.to_thread(child.kill)
            assert not running.done()
            assert await asyncio.to_thread(child.start) == url
        completions = await running
    finally:
        child.kill()
        await client.close()
        await reference.close()
        await undisturbed.close()
    for calm, joined in zip(wanted, completions, strict=True):
        assert joined.failure is None
        assert np.array_equal(calm.token_ids, joined.token_ids)
        assert calm.log_probs.tobytes() == joined.log_probs.tobytes()
        assert (calm.finish_reason, len(joined.token_ids)) == (joined.finish_reason, 200)


async def test_a_client_that_is_killed_leaves_nothing_running_on_the_server(tmp_path):
    server = EmbeddedServer(tiny_model(tmp_path), EngineOptions(context_tokens=256))
    url = await server.start()
    body = {"input_ids": [list(PROMPT)] * 3, "sampling_params": {"max_new_tokens": 250, "ignore_eos": True}, "stream": True}
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{url}/generate", json=body)
        await response.content.readany()
        assert response.connection is not None
        assert response.connection.transport is not None
        response.connection.transport.abort()
        await until(lambda: server.engine.load() == (0, 0))
    assert server.engine.stats.aborted == 3
    await server.close()


async def generated_past(url: str, tokens: int) -> bool:
    return await generated(url) >= tokens
