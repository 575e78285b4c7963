"""Log-probs of given tokens: the embedded engine in SGLang's form, and the teacher's client in front of it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from asyncrl.engines.embedded import EmbeddedServer, EngineOptions
from asyncrl.engines.teacher import HttpTeacher
from tests.models import tiny_model

ROWS = [[4, 13, 5, 17, 8], [3, 3], [9, 8, 7, 6, 5, 4, 3, 2], [6]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def server(model):
    server = EmbeddedServer(model, EngineOptions(context_tokens=64, max_batch=4))
    url = await server.start()
    yield url
    await server.close()


def expected(model, row, temperature=1.0):
    """float32[P − 1], by transformers."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([row])).logits[0, :-1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(row)[1:, None])[:, 0].numpy()


async def post(url, path, body):
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as answer:
        return answer.status, await answer.json()


def asks(rows, starts, **changes):
    sampling = {"max_new_tokens": 0, "temperature": changes.pop("temperature", 1.0)}
    return {"input_ids": rows, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": starts, **changes}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probs_of_a_prompt_are_those_of_transformers(server, model, temperature):
    _, answers = await post(server, "/generate", asks(ROWS, [0] * len(ROWS), temperature=temperature))
    for row, answer in zip(ROWS, answers, strict=True):
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in entries] == row
        assert entries[0][0] is None
        np.testing.assert_allclose([value for value, _, _ in entries[1:]], expected(model, row, temperature), atol=2e-5)
        assert answer["output_ids"] == []


async def test_they_begin_where_it_is_asked_and_the_first_has_none(server, model):
    _, answer = await post(server, "/generate", asks(ROWS[0], 2))
    first, *rest = answer["meta_info"]["input_token_logprobs"]
    assert first == [None, 5, None]
    np.testing.assert_allclose([value for value, _, _ in rest], expected(model, ROWS[0])[2:], atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprob_start_len": 5}, "must be a token's place"),
        ({"logprob_start_len": [0, 0]}, "must be a token's place"),
        ({"return_logprob": False}, "set return_logprob to true"),
        ({"stream": True}, "stream to false"),
        ({"sampling_params": {"max_new_tokens": 4}}, "max_new_tokens 0"),
        ({"sampling_params": {"max_new_tokens": 0, "temperature": 0}}, "above 0"),
        ({"input_ids": [1] * 65}, "the context is 64"),
        ({"top_logprobs_num": 2}, "unknown field 'top_logprobs_num'"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(server, changes, words):
    status, answer = await post(server, "/generate", asks(ROWS[0], 0) | changes)
    assert status == 400
    assert words in answer["error"]["message"]


async def test_a_server_says_how_it_tokenizes(server):
    _, told = await post(server, "/tokenize", {"prompt": "a b"})
    assert told["count"] == len(told["tokens"])
    status, text = await post(server, "/detokenize", {"tokens": told["tokens"]})
    assert (status, type(text["text"])) == (200, str)
    assert (await post(server, "/tokenize", {"prompt": 3}))[0] == 400
    assert (await post(server, "/detokenize", {"tokens": [-1]}))[0] == 400


# ---- the teacher's client --------------------------------------------------------------------------------------


def sample(row, prompt):
    return np.array(row[:prompt], np.int32), np.array(row[prompt:], np.int32)


def teacher_at(url, **options):
    return HttpTeacher(url, **{"token": None, "temperature": 1.0, "timeout_seconds": 30.0, **options})


async def judged(url, samples, **options):
    teacher = teacher_at(url, **options)
    try:
        return await teacher.judge(samples)
    finally:
        await teacher.close()


async def test_a_teacher_judges_the_response_s_tokens_alone(server, model):
    samples = [sample(ROWS[0], 2), sample(ROWS[2], 1), sample(ROWS[1], 2)]
    first, second, empty = await judged(server, samples, temperature=0.6)
    np.testing.assert_allclose(first.log_probs, expected(model, ROWS[0], 0.6)[1:], atol=2e-5)
    np.testing.assert_allclose(second.log_probs, expected(model, ROWS[2], 0.6), atol=2e-5)
    assert first.log_probs.dtype == np.float32
    assert (len(empty.log_probs), empty.failure) == (0, None)


async def test_one_that_cannot_be_judged_does_not_fail_its_neighbours(server, model):
    good, bad = await judged(server, [sample(ROWS[0], 2), sample([1] * 70, 2)])
    np.testing.assert_allclose(good.log_probs, expected(model, ROWS[0])[1:], atol=2e-5)
    assert bad.log_probs is None
    assert "the context is 64" in bad.failure


@asynccontextmanager
async def pretender(answer):
    """A server that answers /generate with what `answer(body)` returns: (status, JSON)."""

    async def generate(request):
        status, body = answer(await request.json())
        return web.json_response(body, status=status)

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def answers(body, value=-0.5):
    return [
        {"meta_info": {"input_token_logprobs": [[None, row[start], None], *([value, token, None] for token in row[start + 1 :])]}}
        for row, start in zip(body["input_ids"], body["logprob_start_len"], strict=True)
    ]


async def test_a_server_that_is_away_is_asked_again():
    calls = []

    def at_first_away(body):
        calls.append(body)
        return (503, {}) if len(calls) == 1 else (200, answers(body))

    async with pretender(at_first_away) as url:
        (found,) = await judged(url, [sample(ROWS[0], 2)])
    assert found.log_probs.tolist() == [-0.5] * 3
    assert calls[0]["logprob_start_len"] == [1]
    assert calls[0]["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


async def test_past_the_deadline_a_sample_has_failed():
    async with pretender(lambda body: (503, {})) as url:
        async with asyncio.timeout(10):
            (found,) = await judged(url, [sample(ROWS[0], 2)], timeout_seconds=0.2)
    assert found.log_probs is None
    assert "no answer within 0.2 s (algorithm.teacher.timeout_seconds): HTTP 503" in found.failure


NO_ANSWERS = ([], [{}], [{"meta_info": {}}], {"meta_info": 3}, [{"meta_info": {"input_token_logprobs": [1]}}])


@pytest.mark.parametrize("answer", NO_ANSWERS)
async def test_an_answer_that_is_not_sglang_s_fails_the_sample(answer):
    async with pretender(lambda body: (200, answer)) as url:
        (found,) = await judged(url, [sample(ROWS[0], 2)])
    assert "not SGLang's" in found.failure


async def test_log_probs_of_other_tokens_fail_the_sample():
    def shifted(body):
        return 200, answers({**body, "input_ids": [[token + 1 for token in row] for row in body["input_ids"]]})

    async with pretender(shifted) as url:
        (found,) = await judged(url, [sample(ROWS[0], 2)])
    assert found.failure == "its log-probs are not of the tokens that were sent"


async def test_a_token_that_the_teacher_never_says_is_minus_infinity():
    async with pretender(lambda body: (200, answers(body, value=None))) as url:
        (found,) = await judged(url, [sample(ROWS[0], 4)])
    assert found.log_probs.tolist() == [-np.inf]
