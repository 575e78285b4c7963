"""SGLang's protocol, as a client sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
import torch

from asyncrl.engines.embedded import EmbeddedServer, EngineOptions
from asyncrl.protocols import PolicyVersion
from tests.models import tiny_model
from tests.waiting import until

PROMPT = [4, 13, 5, 17]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


class Client:
    """Requests to one server, answers as (status, JSON or text)."""

    def __init__(self, server: EmbeddedServer, url: str, session: aiohttp.ClientSession):
        self.server, self.url, self.session = server, url, session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def generate(self, **body: Any) -> Any:
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        return answer

    async def stream(self, **body: Any) -> list[Any]:
        async with self.session.post(f"{self.url}/generate", json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            events = (await response.text()).strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@pytest.fixture
async def client(model):
    server = EmbeddedServer(model, EngineOptions(context_tokens=256, max_batch=8))
    url = await server.start()
    async with aiohttp.ClientSession() as session:
        yield Client(server, url, session)
    await server.close()


async def test_a_response_has_sglangs_form(client):
    answer = await client.generate(
        input_ids=PROMPT,
        rid="mine",
        extra_key="v1",
        return_logprob=True,
        sampling_params={"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
    )
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 6
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[0] <= 0 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 6, 0)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]


async def test_batches_and_n_samples_come_back_in_order(client):
    prompts = [[5, 6], [7, 8], [5, 6]]
    settings = [{"max_new_tokens": count, "temperature": 0, "ignore_eos": True} for count in (3, 5, 3)]
    answers = await client.generate(input_ids=prompts, sampling_params=settings, rid=["a", "b", "c"])
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]
    assert [len(answer["output_ids"]) for answer in answers] == [3, 5, 3]
    assert answers[0]["output_ids"] == answers[2]["output_ids"]
    samples = await client.generate(input_ids=PROMPT, sampling_params={"n": 4, "max_new_tokens": 9, "sampling_seed": 5})
    assert len(samples) == 4
    assert len({tuple(sample["output_ids"]) for sample in samples}) > 1
    again = await client.generate(input_ids=PROMPT, sampling_params={"n": 4, "max_new_tokens": 9, "sampling_seed": 5})
    assert [sample["output_ids"] for sample in again] == [sample["output_ids"] for sample in samples]


async def test_text_goes_in_and_comes_out(client):
    answer = await client.generate(text="1+2=", sampling_params={"max_new_tokens": 5, "temperature": 0})
    same = await client.generate(input_ids=[4, 13, 5, 17], sampling_params={"max_new_tokens": 5, "temperature": 0})
    assert answer["output_ids"] == same["output_ids"]
    assert isinstance(answer["text"], str)
    assert "text" not in same


async def test_a_stream_is_cumulative_and_ends_with_done(client):
    chunks = await client.stream(
        input_ids=PROMPT, sampling_params={"max_new_tokens": 5, "ignore_eos": True, "stream_interval": 2}, return_logprob=True
    )
    assert [len(chunk["output_ids"]) for chunk in chunks] == [2, 4, 5]
    assert all(len(chunk["meta_info"]["output_token_logprobs"]) == len(chunk["output_ids"]) for chunk in chunks)
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True, True, False]
    assert "weight_versions" in chunks[-1]["meta_info"]


async def test_an_incremental_stream_tells_each_token_once(client):
    settings = [
        {"max_new_tokens": count, "ignore_eos": True, "stream_interval": 3, "sampling_seed": count} for count in (8, 2, 6)
    ]
    asked = {"input_ids": [PROMPT] * 3, "sampling_params": settings, "return_logprob": True}
    whole = await client.generate(**asked)
    chunks = await client.stream(**asked, incremental=True)
    for index, expected in enumerate(whole):
        told: list[int] = []
        for chunk in (chunk for chunk in chunks if chunk["index"] == index):
            told += chunk["output_ids"]
            assert [entry[1] for entry in chunk["meta_info"]["output_token_logprobs"]] == chunk["output_ids"]
            assert chunk["meta_info"]["completion_tokens"] == len(told)
            assert chunk["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": len(told)}]
        assert told == expected["output_ids"]
        assert chunk["meta_info"]["finish_reason"] == {"type": "length", "length": len(told)}


async def test_a_response_goes_on_where_it_was_cut(client):
    settings = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5}
    whole = (await client.generate(input_ids=PROMPT, sampling_params=settings))["output_ids"]
    for made in (1, 5, 11):
        rest = {**settings, "max_new_tokens": 12 - made, "seed_offset": made}
        answer = await client.generate(input_ids=PROMPT + whole[:made], sampling_params=rest)
        assert answer["output_ids"] == whole[made:]


async def test_a_streamed_batch_names_each_index_and_sends_a_finished_one_at_once(client):
    settings = [{"max_new_tokens": count, "ignore_eos": True, "stream_interval": 1000} for count in (50, 2, 20)]
    chunks = await client.stream(input_ids=[PROMPT] * 3, sampling_params=settings)
    assert [(chunk["index"], len(chunk["output_ids"])) for chunk in chunks] == [(1, 2), (2, 20), (0, 50)]


async def test_numbers_beyond_what_the_engine_counts_to_are_as_good_as_the_largest(client):
    settings = {"max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 3}
    usual = await client.generate(input_ids=PROMPT, sampling_params=settings)
    huge = {**settings, "top_k": 2**64 - 1, "stream_interval": 2**64 - 1}
    (chunk,) = await client.stream(input_ids=PROMPT, sampling_params=huge)
    assert chunk["output_ids"] == usual["output_ids"]


async def test_stop_tokens_and_end_tokens(client):
    greedy = await client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 30, "temperature": 0, "ignore_eos": True})
    stop = greedy["output_ids"][3]
    answer = await client.generate(
        input_ids=PROMPT, sampling_params={"max_new_tokens": 30, "temperature": 0, "ignore_eos": True, "stop_token_ids": [stop]}
    )
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    seeds = range(40)
    ended = await client.generate(
        input_ids=[PROMPT] * len(seeds), sampling_params=[{"max_new_tokens": 60, "sampling_seed": seed} for seed in seeds]
    )
    stopped = [answer for answer in ended if answer["meta_info"]["finish_reason"]["type"] == "stop"]
    assert stopped
    assert all(answer["output_ids"][-1] == 1 and 1 not in answer["output_ids"][:-1] for answer in stopped)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{not json", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([1, 2], "must be a JSON object"),
        ({}, "exactly one of input_ids and text"),
        ({"input_ids": PROMPT, "text": "x"}, "exactly one of input_ids and text"),
        ({"input_ids": []}, "not empty"),
        ({"input_ids": [[]]}, "at least one token id"),
        ({"input_ids": "abc"}, "must be a list of token ids"),
        ({"input_ids": [1, True]}, "integers"),
        ({"input_ids": [1, 64]}, r"[0, 64), and one is 64"),
        ({"input_ids": [1, -1]}, "one is -1"),
        ({"text": 5}, "text must be a string"),
        ({"input_ids": PROMPT, "steam": True}, "unknown field 'steam'"),
        ({"input_ids": PROMPT, "stream": "yes"}, "stream must be true or false"),
        ({"input_ids": PROMPT, "incremental": True}, "set stream to true"),
        ({"input_ids": PROMPT, "sampling_params": {"seed_offset": 4}}, "seed_offset must be an integer in [0, 3]"),
        ({"input_ids": PROMPT, "rid": 7}, "rid must be"),
        ({"input_ids": PROMPT, "top_logprobs_num": 3}, "does not act on"),
        ({"input_ids": PROMPT, "sampling_params": []}, "sampling_params must be"),
        ({"input_ids": PROMPT, "sampling_params": {"temprature": 1}}, "unknown sampling parameter 'temprature'"),
        ({"input_ids": PROMPT, "sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty is 1.2"),
        ({"input_ids": PROMPT, "sampling_params": {"regex": "a"}}, "unknown sampling parameter 'regex'"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": "hot"}}, "temperature must be"),
        (b'{"input_ids": [4], "sampling_params": {"temperature": NaN}}', "not JSON"),
        (b'{"input_ids": [4], "sampling_params": {"temperature": Infinity}}', "not JSON"),
        ({"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, "top_p must lie"),
        ({"input_ids": PROMPT, "sampling_params": {"top_p": 1.5}}, "top_p must be"),
        ({"input_ids": PROMPT, "sampling_params": {"top_k": 0}}, "top_k must be"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens must be"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1.5}}, "max_new_tokens must be"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 253}}, "ask for at most 252 tokens"),
        ({"input_ids": [5] * 256}, "shorten the prompt"),
        ({"input_ids": PROMPT, "sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids must be"),
        ({"input_ids": PROMPT, "sampling_params": {"sampling_seed": "x"}}, "sampling_seed must be"),
        ({"input_ids": PROMPT, "sampling_params": {"n": 10**9}}, "n must be"),
    ],
)
async def test_a_bad_request_is_refused_with_its_reason_and_the_server_lives_on(client, body, words):
    status, answer = await client.post("/generate", body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert (await client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1}))["output_ids"]


async def test_abort_by_rid_and_abort_all(client):
    def call(rid: str):
        return asyncio.create_task(
            client.generate(input_ids=PROMPT, rid=rid, sampling_params={"max_new_tokens": 250, "ignore_eos": True})
        )

    others = [call(f"other {number}") for number in range(12)]
    await until(lambda: sum(client.server.engine.load()) == 12)
    one = call("one")  # behind twelve others in eight slots
    await until(lambda: sum(client.server.engine.load()) == 13)
    await until(lambda: sum(client.server.engine.load()) == 13)
    assert (await client.post("/abort_request", {"rid": "one"}))[0] == 200
    assert (await one)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await client.post("/abort_request", {"abort_all": True}))[0] == 200
    kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in await asyncio.gather(*others)]
    assert "abort" in kinds
    for body in ({}, {"rid": ""}, {"rid": 3}, {"abort_all": "yes"}, []):
        assert (await client.post("/abort_request", body))[0] == 400


async def test_a_client_that_disconnects_aborts_its_request(client):
    settings = {"max_new_tokens": 250, "ignore_eos": True}
    body = {"input_ids": [PROMPT] * 40, "sampling_params": settings, "stream": True}
    async with client.session.post(f"{client.url}/generate", json=body) as response:
        await response.content.readany()
    await until(lambda: client.server.engine.load() == (0, 0))
    assert client.server.engine.stats.aborted > 0


async def test_requests_open_when_the_server_closes_are_answered(client):
    waiting = asyncio.create_task(
        client.generate(input_ids=[PROMPT] * 8, sampling_params={"max_new_tokens": 250, "ignore_eos": True})
    )
    await until(lambda: sum(client.server.engine.load()) == 8)
    await client.server.close()
    answers = await waiting
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}


async def test_information(client):
    assert (await client.get("/health"))[0] == 200
    assert (await client.get("/ping"))[0] == 200
    assert (await client.get("/health_generate"))[0] == 200
    assert (await client.post("/flush_cache", {}))[0] == 200
    status, info = await client.get("/model_info")
    assert (status, info["weight_version"], info["is_generation"]) == (200, "default", True)
    assert (await client.get("/server_info"))[1]["generated_tokens"] == 1
    assert (await client.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 0
    assert (await client.get("/nothing"))[0] == 404


async def test_a_swap_in_mid_stream_shows_in_the_spans(client):
    staged = {name: tensor.clone() for name, tensor in client.server.engine.live().items()}
    settings = {"max_new_tokens": 120, "ignore_eos": True, "stream_interval": 1}
    body = {"input_ids": PROMPT, "sampling_params": settings, "stream": True, "return_logprob": True}
    async with client.session.post(f"{client.url}/generate", json=body) as response:
        await response.content.readany()
        await asyncio.to_thread(client.server.engine.commit, staged, PolicyVersion(1, 1), "keep")
        last = json.loads((await response.text()).strip().split("\n\n")[-2].removeprefix("data: "))
    first, second = last["meta_info"]["weight_versions"]
    assert (first["version"], first["start"]) == ("default", 0)
    assert (second["version"], second["start"], second["end"]) == ("1.1", first["end"], 120)
    assert last["meta_info"]["weight_version"] == "1.1"
    assert isinstance(staged["model.norm.weight"], torch.Tensor)


async def test_without_a_stream_nothing_is_told_before_the_end(client):
    told: list[int] = []
    listener = client.server.engine._listener

    def count(updates) -> None:
        told.append(len(updates))
        listener(updates)

    client.server.engine._listener = count
    await client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 20, "ignore_eos": True})
    assert told == [1]
