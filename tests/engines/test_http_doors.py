"""The HTTP front's door: without the token nothing is done, and who dawdles keeps nobody waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest

from asyncrl.engines.client import FleetClient, fixed_fleet
from asyncrl.engines.embedded import EmbeddedServer, EngineOptions, http
from asyncrl.protocols import GenerateRequest, MemberRequest, SamplingParams
from tests.models import tiny_model
from tests.waiting import until

TOKEN = "a-token-of-this-run-alone"
ASKED = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 4}}
PATHS = [
    ("POST", "/generate"), ("POST", "/abort_request"), ("POST", "/flush_cache"), ("GET", "/flush_cache"), ("GET", "/ping"),
    ("GET", "/health"), ("GET", "/health_generate"), ("GET", "/model_info"), ("GET", "/get_model_info"), ("GET", "/server_info"),
    ("GET", "/get_server_info"), ("GET", "/v1/loads"), ("GET", "/nowhere"), ("DELETE", "/generate"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


class Served:
    def __init__(self, server: EmbeddedServer, url: str):
        self.server, self.url = server, url

    @property
    def where(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)

    def done(self) -> tuple[int, int]:
        stats = self.server.engine.stats
        return stats.prefilled_tokens, stats.generated_tokens


@pytest.fixture
async def served(model) -> AsyncIterator[Served]:
    server = EmbeddedServer(model, EngineOptions(context_tokens=64, max_batch=4))
    yield Served(server, await server.start(token=TOKEN))
    await server.close()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer another-token"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer \u00fc"},
        {"Cookie": f"Authorization=Bearer {TOKEN}"},
    ],
    ids=str,
)
async def test_without_the_token_every_request_is_refused_and_nothing_is_done(served, headers):
    before = served.done()
    async with aiohttp.ClientSession(headers=headers) as session:
        for method, path in PATHS:
            async with session.request(method, served.url + path, json=ASKED if method == "POST" else None) as response:
                assert response.status == 401, (method, path)
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["type"] == "Unauthorized"
    assert served.done() == before


async def test_a_stranger_cannot_abort_what_is_generated(served):
    async with aiohttp.ClientSession() as session:
        owner = {"Authorization": f"Bearer {TOKEN}"}
        long = {"input_ids": [4, 5], "rid": "mine", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        answer = asyncio.create_task(session.post(f"{served.url}/generate", json=long, headers=owner))
        await until(lambda: served.done()[0] > 0)
        async with session.post(f"{served.url}/abort_request", json={"abort_all": True}) as refused:
            assert refused.status == 401
        async with await answer as response:
            assert (await response.json())["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(("token", "failed"), [(TOKEN, False), (None, True), ("another-token-altogether", True)])
async def test_the_fleet_client_brings_its_token(served, token, failed):
    client = FleetClient(fixed_fleet({"inference/0": served.url}), token=token)
    request = GenerateRequest(np.asarray([4, 5], np.int32), (MemberRequest(0, "a", 1),), SamplingParams(4, ignore_eos=True), 5.0)
    (completion,) = [completion async for completions in client.generate(request) for completion in completions]
    assert (completion.failure is not None) == failed
    assert not failed or "401" in str(completion.failure)
    await client.close()


@pytest.mark.parametrize("head", [b"", b"POST /generate HTTP/1.1\r\nHost: x\r\n", None], ids=["silent", "head", "body"])
async def test_who_dawdles_is_hung_up_on_and_keeps_nobody_waiting(model, monkeypatch, head):
    monkeypatch.setattr(http, "REQUEST_SECONDS", 1.0)
    server = EmbeddedServer(model, EngineOptions(context_tokens=64, max_batch=4))
    where = Served(server, await server.start(token=TOKEN))
    whole = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000\r\n\r\n".encode()
    began = time.monotonic()
    dawdlers = [asyncio.create_task(dawdle(where, whole if head is None else head)) for _ in range(50)]
    client = FleetClient(fixed_fleet({"inference/0": where.url}), token=TOKEN)
    request = GenerateRequest(np.asarray([4, 5], np.int32), (MemberRequest(0, "a", 1),), SamplingParams(4, ignore_eos=True), 5.0)
    (completion,) = [completion async for completions in client.generate(request) for completion in completions]
    assert completion.failure is None
    answers = await asyncio.wait_for(asyncio.gather(*dawdlers), 20)
    assert time.monotonic() - began >= 0.9
    assert {answer[:12] for answer in answers} == ({b"HTTP/1.1 408"} if head is None else {b""})
    await client.close()
    await server.close()


async def dawdle(where: Served, head: bytes) -> bytes:
    """Say `head`, then something more every now and then; what came until the server hung up."""
    reader, writer = await asyncio.open_connection(*where.where)
    writer.write(head)
    answer = asyncio.create_task(reader.read(1000))
    while not answer.done():
        if head:
            writer.write(b"x")
        await asyncio.wait([answer], timeout=0.1)
    writer.close()
    try:
        return answer.result()
    except ConnectionResetError:
        return b""
