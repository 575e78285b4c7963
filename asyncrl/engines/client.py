"""The client of one or more inference servers that speak SGLang's protocol: one streaming call per group, one chunk per member.

generate ─▶ route (least loaded that takes traffic; waits for one) ─▶ POST /generate ─▶ a completion per finished member
update(view) ─┘                                                         └─ anything that goes wrong: completions with `failure`
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from asyncrl.errors import GenerationFailed
from asyncrl.messages import FinishReason
from asyncrl.protocols import Completion, FleetView, GenerateRequest, PolicyVersion, ServerView

log = logging.getLogger(__name__)
WHOLE_RESPONSE = 1 << 30  # stream_interval: no chunk before the end
CONNECT_SECONDS = 10.0
ABORT_SECONDS = 10.0
Failures = (aiohttp.ClientError, OSError, TimeoutError, GenerationFailed)


def fixed_fleet(urls: Mapping[str, str]) -> FleetView:
    """A view of servers that nobody synchronises: all READY, version unknown."""
    servers = tuple(ServerView(name, url, "READY", None) for name, url in urls.items())
    return FleetView(seq=0, incarnation=0, confirmed=None, published=None, servers=servers)


class FleetClient:
    """`protocols.InferenceEngine` over HTTP. `update` tells it which servers there are and which take traffic.

    A member belongs to one server from start to end; what a lost server had not finished fails, and the caller decides.
    """

    def __init__(self, view: FleetView | None = None):
        self._view = view or fixed_fleet({})
        self._changed = asyncio.Event()
        self._load: dict[str, int] = {}
        self._urls: dict[str, str] = {}  # rid to the server that has it
        self._session: aiohttp.ClientSession | None = None

    def update(self, view: FleetView) -> None:
        """The newest view of the fleet; calls that wait for a server look again."""
        self._view = view
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """One completion per member, each as it finishes. Leaving the iterator early aborts the rest on the server."""
        missing = {member.index for member in request.members}
        deadline = asyncio.get_running_loop().time() + request.timeout_seconds
        server: ServerView | None = None
        try:
            server = await self._route(request.server, deadline)
            async with aclosing(self._generate_on(server, request, deadline)) as completions:
                async for completion in completions:
                    missing.discard(completion.index)
                    yield completion
        except Failures as error:
            name = server.name if server else request.server or ""
            failure = _explain(error, server, request.timeout_seconds)
            for index in sorted(missing):
                yield _failed(index, name, failure)

    async def abort(self, rids: Sequence[str]) -> None:
        """Ask the servers that have these requests to end them. A server that cannot be reached has lost them anyway."""
        by_url: dict[str, list[str]] = {}
        for rid in rids:
            if rid in self._urls:
                by_url.setdefault(self._urls[rid], []).append(rid)
        await asyncio.gather(*(self._abort_on(url, rid) for url, mine in by_url.items() for rid in mine))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _route(self, wanted: str | None, deadline: float) -> ServerView:
        """The least loaded server that takes traffic, or the one wanted by name; waits for it until the deadline."""
        while True:
            servers = [server for server in self._view.servers if server.takes_traffic and wanted in (None, server.name)]
            if servers:
                return min(servers, key=lambda server: self._load.get(server.name, 0))
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()

    async def _generate_on(
        self, server: ServerView, request: GenerateRequest, deadline: float
    ) -> AsyncGenerator[Completion, None]:
        """Completions as the server sends them. Raises one of `Failures` when it stops doing so."""
        left = {member.rid for member in request.members}
        self._urls.update(dict.fromkeys(left, server.url))
        self._load[server.name] = self._load.get(server.name, 0) + len(left)
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._post(server, _payload(request, server))
            async with aclosing(_events(response.content, deadline)) as events:
                async for payload in events:
                    if payload["meta_info"].get("finish_reason") is None:
                        continue
                    member = request.members[payload.get("index", 0)]
                    completion = _completion(payload, member.index, server, self._view.incarnation)
                    left.discard(member.rid)
                    self._forget(server, [member.rid])
                    yield completion
            if left:
                raise GenerationFailed(f"the stream ended with {len(left)} of {len(request.members)} responses outstanding")
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise GenerationFailed(f"its answer is not SGLang's: {type(error).__name__}: {error}") from error
        finally:
            self._forget(server, left)
            if response is not None and left:
                response.close()  # the server sees it, and ends what is left
            elif response is not None:
                response.release()

    def _forget(self, server: ServerView, rids: Collection[str]) -> None:
        self._load[server.name] -= len(rids)
        for rid in rids:
            self._urls.pop(rid, None)

    async def _post(self, server: ServerView, payload: dict[str, Any]) -> aiohttp.ClientResponse:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        response = await self._session.post(f"{server.url}/generate", json=payload)
        if response.status != 200:
            text = await response.text()
            response.release()
            raise GenerationFailed(f"HTTP {response.status}: {text[:500]}")
        return response

    async def _abort_on(self, url: str, rid: str) -> None:
        if self._session is None:
            return
        try:
            async with asyncio.timeout(ABORT_SECONDS), self._session.post(f"{url}/abort_request", json={"rid": rid}):
                pass
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("abort of %s at %s: %s", rid, url, error)


def _payload(request: GenerateRequest, server: ServerView) -> dict[str, Any]:
    """One call for the whole group. `extra_key` keeps apart the prefixes that SGLang caches under different versions."""
    sampling = request.sampling
    shared: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "ignore_eos": sampling.ignore_eos,
        "stream_interval": WHOLE_RESPONSE,
    }
    if sampling.stop_token_ids:
        shared["stop_token_ids"] = list(sampling.stop_token_ids)
    prompt = request.prompt_tokens.tolist()
    return {
        "input_ids": [prompt] * len(request.members),
        "sampling_params": [{**shared, "sampling_seed": member.seed} for member in request.members],
        "rid": [member.rid for member in request.members],
        "extra_key": f"version {server.version}",
        "return_logprob": True,
        "stream": True,
    }


async def _events(content: aiohttp.StreamReader, deadline: float) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of a server-sent event stream, up to [DONE]. Raises TimeoutError at the deadline."""
    rest = b""
    while True:
        async with asyncio.timeout_at(deadline):
            chunk = await content.readany()
        if not chunk:
            return
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                async with asyncio.timeout_at(deadline):
                    await content.read()
                return
            payload = json.loads(data)
            if "error" in payload:
                raise GenerationFailed(f"the server says: {payload['error']}")
            yield payload


def _completion(payload: Mapping[str, Any], index: int, server: ServerView, incarnation: int) -> Completion:
    """Raises KeyError, TypeError or ValueError for an answer that does not have SGLang's form."""
    meta = payload["meta_info"]
    token_ids = np.asarray(payload["output_ids"], np.int32)
    reason = meta["finish_reason"]["type"]
    if reason == "abort" and not len(token_ids):
        return _failed(index, server.name, f"aborted: {meta['finish_reason'].get('message')}", reason="abort")
    log_probs = np.asarray([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
    if len(log_probs) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(log_probs)} log-probs")
    if "weight_versions" not in meta:
        raise ValueError("no weight_versions in meta_info: the server must be SGLang 0.5.20 or newer")
    versions, oldest = _versions(meta["weight_versions"], len(token_ids))
    failure = None
    if reason == "abort":
        failure = f"aborted: {meta['finish_reason'].get('message')}"
    elif oldest < incarnation:
        failure = f"computed by weights of the trainer's start {oldest}, and the present one is {incarnation}"
    elif reason not in ("stop", "length"):
        raise ValueError(f"finish reason {reason!r}")
    return Completion(index, token_ids, log_probs, versions, reason, server.name, failure)


def _versions(spans: Sequence[Mapping[str, Any]], length: int) -> tuple[npt.NDArray[np.int32], int]:
    """int32[length], each token's version, and the oldest incarnation among them. The spans must cover the tokens exactly."""
    versions = np.zeros(length, np.int32)
    position, oldest = 0, 1 << 62
    for span in spans:
        if span["start"] != position or span["end"] < position:
            raise ValueError(f"weight_versions {spans!r} do not follow one another")
        version = _policy_version(span["version"])
        versions[position : span["end"]] = version.version
        position = span["end"]
        oldest = min(oldest, version.incarnation)
    if position != length:
        raise ValueError(f"weight_versions {spans!r} cover {position} of {length} tokens")
    return versions, oldest


def _policy_version(text: str) -> PolicyVersion:
    """A server that was never updated says "default": version 0 of no incarnation; so is a plain number."""
    if text == "default":
        return PolicyVersion(0, 0)
    return PolicyVersion.parse(text) if "." in text else PolicyVersion(0, int(text))


def _failed(index: int, server: str, failure: str, *, reason: FinishReason = "failed") -> Completion:
    nothing = np.zeros(0, np.int32)
    return Completion(index, nothing, np.zeros(0, np.float32), nothing, reason, server, failure)


def _explain(error: BaseException, server: ServerView | None, timeout_seconds: float) -> str:
    if isinstance(error, TimeoutError):
        what = f"server {server.name} did not finish" if server else "no server took traffic"
        return f"{what} within {timeout_seconds:g} s"
    return f"server {server.name if server else '?'}: {error or type(error).__name__}"
