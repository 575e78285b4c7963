"""One conformance suite for `InferenceEngine`, on the real client with a real server and on the fake; then what only HTTP has."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from asyncrl.clock import SystemClock
from asyncrl.engines.client import FleetClient, fixed_fleet
from asyncrl.engines.embedded import EmbeddedServer, EngineOptions
from asyncrl.protocols import Completion, FleetView, GenerateRequest, InferenceEngine, MemberRequest, SamplingParams, ServerView
from asyncrl.simulation.inference import FakeInference
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def serving(model, **options) -> AsyncIterator[tuple[EmbeddedServer, str]]:
    server = EmbeddedServer(model, EngineOptions(context_tokens=128, **options))
    try:
        yield server, await server.start()
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def real_engine(model) -> AsyncIterator[InferenceEngine]:
    async with serving(model) as (_, url):
        client = FleetClient(fixed_fleet({"inference/0": url}))
        yield client
        await client.close()


@contextlib.asynccontextmanager
async def fake_engine(model) -> AsyncIterator[InferenceEngine]:
    yield FakeInference(SystemClock(), token_seconds=0.001)


@pytest.fixture(params=[real_engine, fake_engine], ids=["embedded", "fake"])
async def engine(request, model):
    async with request.param(model) as made:
        yield made


def group(*, members: int = 4, max_new: int = 12, seed: int = 0, timeout: float = 20.0, prompt=(4, 13, 5, 17), **sampling):
    return GenerateRequest(
        prompt_tokens=np.asarray(prompt, np.int32),
        members=tuple(MemberRequest(index, f"0/1/0/{index}-{seed}", seed + index) for index in range(members)),
        sampling=SamplingParams(max_new_tokens=max_new, **sampling),
        timeout_seconds=timeout,
    )


async def collect(engine: InferenceEngine, request: GenerateRequest) -> dict[int, Completion]:
    completions = [completion async for completions in engine.generate(request) for completion in completions]
    assert len({completion.index for completion in completions}) == len(completions)
    return {completion.index: completion for completion in completions}


# ---- every InferenceEngine


async def test_every_member_is_completed_once_with_arrays_of_one_length(engine):
    completions = await collect(engine, group(members=8))
    assert sorted(completions) == list(range(8))
    for completion in completions.values():
        assert completion.failure is None
        assert 1 <= len(completion.token_ids) == len(completion.log_probs) == len(completion.versions) <= 12
        assert completion.finish_reason == ("length" if len(completion.token_ids) == 12 else completion.finish_reason)
        assert (completion.log_probs <= 0).all()
        assert completion.token_ids.dtype == completion.versions.dtype == np.int32
        assert completion.log_probs.dtype == np.float32


async def test_seed_and_prompt_determine_the_answer(engine):
    first, again, other = [await collect(engine, group(seed=seed)) for seed in (7, 7, 8)]
    assert all(np.array_equal(first[index].token_ids, again[index].token_ids) for index in first)
    assert any(not np.array_equal(first[index].token_ids, other[index].token_ids) for index in first)


async def test_members_with_different_seeds_differ(engine):
    completions = await collect(engine, group(members=6))
    assert len({completion.token_ids.tobytes() for completion in completions.values()}) > 1


async def test_abort_ends_members_early_and_says_so(engine):
    request = group(members=3, max_new=120, ignore_eos=True)
    waiting = asyncio.create_task(collect(engine, request))
    await asyncio.sleep(0)
    while not waiting.done():
        await engine.abort([member.rid for member in request.members])
        await asyncio.sleep(0.001)
    completions = await waiting
    assert sorted(completions) == [0, 1, 2]
    for completion in completions.values():
        assert completion.finish_reason == "abort"
        assert completion.failure


async def test_a_deadline_passed_is_a_failure_of_each_member_left(engine):
    completions = await collect(engine, group(members=2, max_new=110, ignore_eos=True, timeout=0.0005))
    assert [completion.finish_reason for completion in completions.values()] == ["failed", "failed"]
    assert all("within 0.0005 s" in (completion.failure or "") for completion in completions.values())


async def test_leaving_early_gives_up_the_rest_and_the_engine_goes_on(engine):
    stream = engine.generate(group(members=4, max_new=8))
    async for _ in stream:
        break
    await stream.aclose()
    assert len(await collect(engine, group(members=4))) == 4


# ---- the real client


async def test_calls_go_to_the_least_loaded_server(model):
    async with serving(model) as (first, one), serving(model) as (second, two):
        client = FleetClient(fixed_fleet({"a": one, "b": two}))
        done = await asyncio.gather(*(collect(client, group(seed=10 * seed)) for seed in range(6)))
        assert sum(len(completions) for completions in done) == 24
        assert first.engine.stats.finished == second.engine.stats.finished == 12
        await client.close()


async def test_a_server_that_is_behind_gets_no_traffic_and_a_call_waits_for_one_that_is_not(model):
    async with serving(model) as (_, url):

        def view(state: str) -> FleetView:
            return FleetView(1, 0, 3, 3, (ServerView("inference/0", url, state, 3),))

        client = FleetClient(view("STALE"))
        waiting = asyncio.create_task(collect(client, group()))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        client.update(view("READY"))
        assert all(completion.failure is None for completion in (await waiting).values())
        client.update(view("STALE"))
        refused = await collect(client, group(timeout=0.05))
        assert {completion.failure for completion in refused.values()} == {"no server took traffic within 0.05 s"}
        await client.close()


async def test_a_server_that_is_gone_fails_the_members_and_names_itself():
    client = FleetClient(fixed_fleet({"inference/0": "http://127.0.0.1:9"}))
    completions = await collect(client, group(members=2, timeout=0.3))
    assert all("after one was lost: server inference/0" in (completion.failure or "") for completion in completions.values())
    await client.close()


async def test_a_refusal_reaches_the_caller_in_the_servers_words(model):
    async with serving(model) as (_, url):
        client = FleetClient(fixed_fleet({"inference/0": url}))
        completions = await collect(client, group(members=2, max_new=500))
        assert all("HTTP 400" in (c.failure or "") and "context of 128" in (c.failure or "") for c in completions.values())
        await client.close()


def answer(**changes) -> dict:
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-0.1, 5, None], [-0.2, 6, None], [-0.3, 7, None]],
        "weight_versions": [{"version": "2.4", "start": 0, "end": 1}, {"version": "2.5", "start": 1, "end": 3}],
    }
    return {"output_ids": [5, 6, 7], "index": 0, "meta_info": {**meta, **changes}}


@contextlib.asynccontextmanager
async def scripted(payload: dict, incarnation: int = 2, seen: list[dict] | None = None) -> AsyncIterator[FleetClient]:
    """A client of a server that answers every call with this payload; `seen` takes the calls' bodies."""

    async def generate(request: web.Request) -> web.Response:
        if seen is not None:
            seen.append(await request.json())
        return web.json_response(text=f"data: {json.dumps(payload)}\n\ndata: [DONE]\n\n")

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    client = FleetClient(FleetView(1, incarnation, 5, 5, (ServerView("s", f"http://{host}:{port}", "READY", 5),)))
    yield client
    await client.close()
    await runner.cleanup()


async def test_version_spans_become_one_version_per_token():
    async with scripted(answer()) as client:
        (completion,) = (await collect(client, group(members=1))).values()
    assert completion.versions.tolist() == [4, 5, 5]
    assert completion.failure is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_versions": [{"version": "2.4", "start": 0, "end": 2}]}, "cover 2 of 3 tokens"),
        ({"weight_versions": [{"version": "2.4", "start": 1, "end": 3}]}, "do not follow one another"),
        ({"weight_versions": [{"version": "1.4", "start": 0, "end": 3}]}, "trainer's start 1"),
        ({"output_token_logprobs": [[-0.1, 5, None]]}, "3 tokens with 1 log-probs"),
        ({"finish_reason": {"type": "novel"}}, "finish reason"),
        ({"finish_reason": 3}, "not SGLang's"),
    ],
)
async def test_an_answer_that_does_not_add_up_is_a_failure(changes, words):
    async with scripted(answer(**changes)) as client:
        (completion,) = (await collect(client, group(members=1, timeout=0.3))).values()
    assert words in (completion.failure or "")


async def test_a_stream_that_ends_early_leaves_the_members_left_to_be_asked_for_again():
    async with scripted(answer()) as client:
        completions = await collect(client, group(members=2))
    assert [completion.failure for completion in completions.values()] == [None, None]


async def test_the_prefix_key_names_incarnation_and_version():
    seen: list[dict] = []
    async with scripted(answer(), incarnation=2, seen=seen) as client:
        await collect(client, group(members=1))
    assert [body["extra_key"] for body in seen] == ["weights 2.5"]


# ---- groups that share a call


@contextlib.asynccontextmanager
async def counting(monkeypatch) -> AsyncIterator[list[str]]:
    """The paths that clients post to."""
    posts: list[str] = []
    post = aiohttp.ClientSession.post

    def counted(session, url, **options):
        posts.append(url.rsplit("/", 1)[1])
        return post(session, url, **options)

    monkeypatch.setattr(aiohttp.ClientSession, "post", counted)
    yield posts


async def test_groups_asked_for_at_one_moment_share_a_call_and_answer_as_if_alone(model, monkeypatch):
    async with real_engine(model) as client, counting(monkeypatch) as posts:
        seeds = (0, 100, 200)
        together = await asyncio.gather(*(collect(client, group(members=3, seed=seed)) for seed in seeds))
        assert posts == ["generate"]
        for seed, completions in zip(seeds, together, strict=True):
            alone = await collect(client, group(members=3, seed=seed))
            assert {i: c.token_ids.tolist() for i, c in completions.items()} == {
                i: c.token_ids.tolist() for i, c in alone.items()
            }


async def test_a_group_that_leaves_a_shared_call_is_aborted_and_its_neighbour_is_not(model, monkeypatch):
    async with serving(model) as (server, url), counting(monkeypatch) as posts:
        client = FleetClient(fixed_fleet({"inference/0": url}))
        stays = asyncio.create_task(collect(client, group(members=2, max_new=110, ignore_eos=True)))
        leaves = asyncio.create_task(collect(client, group(members=2, max_new=110, ignore_eos=True, seed=50)))
        while server.engine.stats.generated_tokens == 0:  # noqa: ASYNC110 - another thread's state, which tells nobody
            await asyncio.sleep(0.001)
        leaves.cancel()
        assert [completion.failure for completion in (await stays).values()] == [None, None]
        assert posts == ["generate", "abort_request", "abort_request"]
        assert server.engine.stats.aborted == 2
        await client.close()


async def test_a_deadline_in_a_shared_call_is_one_groups_own(model):
    async with real_engine(model) as client:
        short = group(members=2, max_new=110, ignore_eos=True, timeout=0.005, seed=50)
        fine, late = await asyncio.gather(collect(client, group(members=2, max_new=110, ignore_eos=True)), collect(client, short))
        assert [completion.failure for completion in fine.values()] == [None, None]
        assert all("within 0.005 s" in (completion.failure or "") for completion in late.values())


async def test_a_request_that_is_refused_does_not_fail_its_neighbours(model, monkeypatch):
    async with real_engine(model) as client, counting(monkeypatch) as posts:
        bad = group(members=2, max_new=500, seed=50)
        fine, refused = await asyncio.gather(collect(client, group(members=2)), collect(client, bad))
        assert [completion.failure for completion in fine.values()] == [None, None]
        assert all("HTTP 400" in (completion.failure or "") for completion in refused.values())
        assert posts == ["generate"] * 3


async def test_a_closed_client_fails_what_was_under_way(model):
    async with serving(model) as (server, url):
        client = FleetClient(fixed_fleet({"inference/0": url}))
        waiting = asyncio.create_task(collect(client, group(members=2, max_new=110, ignore_eos=True)))
        while server.engine.stats.generated_tokens == 0:  # noqa: ASYNC110 - another thread's state, which tells nobody
            await asyncio.sleep(0.001)
        await client.close()
        assert all(completion.failure for completion in (await waiting).values())
