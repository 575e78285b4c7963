"""Garbage into the HTTP front: every request gets an answer that says whose mistake it was, and the engine decodes on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from urllib.parse import urlsplit

import aiohttp
import pytest

from asyncrl.engines.embedded import EmbeddedServer, EngineOptions
from tests.chaos.garbage import Garbage, pack, resident_bytes
from tests.models import tiny_model
from tests.waiting import until

STRANGERS = 24
PATIENCE_SECONDS = 0.2  # of a stranger, who then hangs up, whatever it had asked for
MISTAKES = {400, 401, 404, 405, 408, 411, 413, 414, 415, 417, 431}
PATHS = (
    b"/generate",
    b"/generate",
    b"/generate",
    b"/abort_request",
    b"/flush_cache",
    b"/health",
    b"/v1/loads",
    b"/nowhere",
    b"*",
)
BODIES = [
    {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 4, "temperature": 0.5, "top_k": 3, "n": 2, "sampling_seed": 7}},
    {
        "input_ids": [[4, 5], [6]],
        "rid": ["a", "b"],
        "sampling_params": [{"max_new_tokens": 2}, {"stop_token_ids": [3]}],
        "stream": True,
    },
    {"text": ["1+2=", "3+4="], "return_logprob": True, "extra_key": "weights 1.2", "sampling_params": {"top_p": 0.5}},
    {"rid": "a"},
    {"abort_all": True},
]


class Requests:
    """Whole requests with wrong bodies, requests with wrong bytes, and bytes that are no request."""

    def __init__(self, seed: int):
        self._bodies = Garbage(seed, [[pack(body)] for body in BODIES])
        self._rng = self._bodies.rng
        self._bytes = Garbage(seed + 1, [[self._request(json.dumps(body).encode())] for body in BODIES])

    def next(self) -> bytes:
        if self._rng.random() < 0.3:
            return b"".join(self._bytes.frames())
        body = self._body()
        return self._request(body if self._rng.random() < 0.8 else body[: self._rng.randrange(len(body) + 1)])

    def _body(self) -> bytes:
        import msgpack

        (frame,) = self._bodies._revalued()[:1]
        value = msgpack.unpackb(frame, strict_map_key=False, unicode_errors="surrogatepass")
        return json.dumps(value, default=str, skipkeys=True).encode("utf-8", "surrogatepass")

    def _request(self, body: bytes) -> bytes:
        rng = self._rng
        method = rng.choice((b"POST", b"POST", b"POST", b"GET", b"DELETE", b"GARBAGE"))
        length = len(body) if rng.random() < 0.95 else rng.choice((0, 1, 10**6, 10**12, -1))
        return b"%b %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (method, rng.choice(PATHS), length, body)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


async def one(where: tuple[str, int], request: bytes) -> int | None:
    """The status of the answer; None for a stranger that had none, or hung up before."""
    reader, writer = await asyncio.open_connection(*where)
    writer.write(request)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = await reader.readline()
    except (TimeoutError, ConnectionError):
        return None
    finally:
        writer.close()
    return int(line.split()[1]) if line.startswith(b"HTTP/1.") else None


async def shout(where: tuple[str, int], requests: Requests, number: int) -> Counter[int | None]:
    found: Counter[int | None] = Counter()

    async def stranger() -> None:
        for _ in range(number // STRANGERS):
            found[await one(where, requests.next())] += 1

    await asyncio.gather(*(stranger() for _ in range(STRANGERS)))
    return found


async def assert_still_serves(server: EmbeddedServer, url: str) -> None:
    await until(lambda: server.engine.load() == (0, 0))
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=BODIES[0]) as response:
        assert response.status == 200
        assert len(await response.json()) == 2
    assert server.engine.alive


async def shouted_at(model, number: int, *, warm_up: int, seed: int, errors: pytest.LogCaptureFixture) -> int:
    """Bytes that memory grew by after the warm-up."""
    server = EmbeddedServer(model, EngineOptions(context_tokens=64, max_batch=8))
    url = await server.start()
    where = (str(urlsplit(url).hostname), int(urlsplit(url).port or 0))
    requests = Requests(seed)
    with errors.at_level(logging.WARNING):
        found = await shout(where, requests, warm_up)
        await assert_still_serves(server, url)
        before = resident_bytes()
        found += await shout(where, requests, number)
        grown = resident_bytes() - before
        await assert_still_serves(server, url)
    print(f"{dict(found)}, {grown / 1e6:.1f} MB more")
    assert found.keys() <= MISTAKES | {200, None}, "nothing that a stranger says is the server's own failure"
    assert found[200]
    assert sum(count for status, count in found.items() if status in MISTAKES) > number // 4
    assert [record.getMessage() for record in errors.records] == []
    await server.close()
    return grown


async def test_the_http_front_outlives_what_strangers_send(model, caplog):
    await shouted_at(model, 600, warm_up=0, seed=1, errors=caplog)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_twenty_thousand_requests_leave_memory_as_it_was(model, caplog):
    assert await shouted_at(model, 20_000, warm_up=4_000, seed=2, errors=caplog) < 10e6
