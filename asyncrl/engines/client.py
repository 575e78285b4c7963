"""The client of one or more inference servers that speak SGLang's protocol: one chunk per member, groups share calls.

generate ─▶ route (least loaded that takes traffic; waits for one) ─▶ shared call ─▶ a completion per finished member
update(view) ─┘                                                         └─ anything that goes wrong: completions with `failure`
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from asyncrl.engines.shared_call import ABORT_SECONDS, NOT_SGLANG, Part, RefusedInCompany, SharedCall
from asyncrl.errors import GenerationFailed
from asyncrl.protocols import Completion, FleetView, GenerateRequest, PolicyVersion, ServerView
from asyncrl.protocols.inference import failed_completion

log = logging.getLogger(__name__)
CONNECT_SECONDS = 10.0
Failures = (aiohttp.ClientError, OSError, TimeoutError, GenerationFailed)


def fixed_fleet(urls: Mapping[str, str]) -> FleetView:
    """A view of servers that nobody synchronises: all READY, version unknown."""
    servers = tuple(ServerView(name, url, "READY", None) for name, url in urls.items())
    return FleetView(seq=0, incarnation=0, confirmed=None, published=None, servers=servers)


class FleetClient:
    """`protocols.InferenceEngine` over HTTP. `update` tells it which servers there are and which take traffic;
    `token` is what they ask for.

    A member belongs to one server from start to end; what a lost server had not finished fails, and the caller decides.
    """

    def __init__(self, view: FleetView | None = None, *, token: str | None = None):
        self._view = view or fixed_fleet({})
        self._changed = asyncio.Event()
        self._load: dict[str, int] = {}
        self._urls: dict[str, str] = {}  # rid to the server that has it
        self._session: aiohttp.ClientSession | None = None
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else None
        self._calls: dict[str, SharedCall] = {}  # the newest, by server
        self._background: set[asyncio.Task[None]] = set()  # calls and aborts

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
                yield failed_completion(index, name, failure)

    async def abort(self, rids: Sequence[str]) -> None:
        """Ask the servers that have these requests to end them. A server that cannot be reached has lost them anyway."""
        by_url: dict[str, list[str]] = {}
        for rid in rids:
            if rid in self._urls:
                by_url.setdefault(self._urls[rid], []).append(rid)
        await asyncio.gather(*(self._abort_on(url, mine) for url, mine in by_url.items()))

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
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
        part = Part(request)
        unused = set(part.left)
        self._urls.update(dict.fromkeys(unused, server.url))
        self._load[server.name] = self._load.get(server.name, 0) + len(unused)
        call = self._join(server, part)
        timer = asyncio.get_running_loop().call_at(deadline, part.fail, TimeoutError())
        try:
            while True:
                try:
                    events = await part.arrived()
                except RefusedInCompany:
                    self._leave(call, part)
                    call = self._join(server, part, is_alone=True)
                    continue
                if not events:
                    return
                for member, event in events:
                    completion = _completion(event, member.index, server, self._view.incarnation)
                    unused.discard(member.rid)
                    self._forget(server, [member.rid])
                    yield completion
        except NOT_SGLANG as error:
            raise GenerationFailed(f"its answer is not SGLang's: {type(error).__name__}: {error}") from error
        finally:
            timer.cancel()
            self._forget(server, unused)
            self._leave(call, part)

    def _join(self, server: ServerView, part: Part, *, is_alone: bool = False) -> SharedCall:
        """The call that is about to be sent to this server, or a new one."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self._headers)
        call, prefix_key = self._calls.get(server.name), f"weights {self._view.incarnation}.{server.version}"
        if is_alone or call is None or not call.admits(server, part, prefix_key):
            call = SharedCall(self._session, server, self._abort_on, prefix_key=prefix_key, is_alone=is_alone)
            self._calls[server.name] = call
            self._keep(call.task)
        part.again()
        call.join(part)
        return call

    def _leave(self, call: SharedCall, part: Part) -> None:
        if (abort := call.leave(part)) is not None:
            self._keep(asyncio.get_running_loop().create_task(abort))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _forget(self, server: ServerView, rids: Collection[str]) -> None:
        self._load[server.name] -= len(rids)
        for rid in rids:
            self._urls.pop(rid, None)

    async def _abort_on(self, url: str, rids: Sequence[str]) -> None:
        """SGLang takes one id a call."""
        if self._session is None:
            return
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                for rid in rids:
                    async with self._session.post(f"{url}/abort_request", json={"rid": rid}):
                        pass
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("abort of %d requests at %s: %s", len(rids), url, error)


def _completion(payload: Mapping[str, Any], index: int, server: ServerView, incarnation: int) -> Completion:
    """Raises KeyError, TypeError or ValueError for an answer that does not have SGLang's form."""
    meta = payload["meta_info"]
    token_ids = np.asarray(payload["output_ids"], np.int32)
    reason = meta["finish_reason"]["type"]
    if reason == "abort" and not len(token_ids):
        return failed_completion(index, server.name, f"aborted: {meta['finish_reason'].get('message')}", reason="abort")
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


@functools.lru_cache(maxsize=64)
def _policy_version(text: str) -> PolicyVersion:
    """A server that was never updated says "default": version 0 of no incarnation; so is a plain number."""
    if text == "default":
        return PolicyVersion(0, 0)
    return PolicyVersion.parse(text) if "." in text else PolicyVersion(0, int(text))


def _explain(error: BaseException, server: ServerView | None, timeout_seconds: float) -> str:
    if isinstance(error, TimeoutError):
        what = f"server {server.name} did not finish" if server else "no server took traffic"
        return f"{what} within {timeout_seconds:g} s"
    return f"server {server.name if server else '?'}: {error or type(error).__name__}"
