"""Groups that are asked of one server at the same moment travel in one POST /generate, and its stream is shared out among them.

    part ─┐
    part ─┼─ (one turn of the event loop) ─▶ one call ─▶ one stream ─▶ each event to the part whose member it is
    part ─┘

| loop            | consumes                | waits for            | is unblocked by                      |
|-----------------|-------------------------|----------------------|--------------------------------------|
| call            | the stream              | headers, events      | the server, the end of its last part |
| part (caller's) | its events              | the next one         | the call, its own deadline           |
| abort           | what a part left behind | the call's headers   | the server, ABORT_SECONDS            |

A part's deadline, failure and end are its own: the members of one that leaves early are aborted by rid while the others go on,
and the last one to leave closes the connection. Parts that a server refuses in company are asked for again one by one, so that a
request that cannot be served does not fail its neighbours.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp
import orjson

from asyncrl.errors import GenerationFailed
from asyncrl.protocols import GenerateRequest, MemberRequest, ServerView

MAX_MEMBERS = 1024  # responses in one call
ABORT_SECONDS = 10.0
DRAIN_SECONDS = 10.0
WHOLE_RESPONSE = 1 << 30  # stream_interval: no chunk before the end
HEADERS = {"Content-Type": "application/json"}
NOT_SGLANG = (KeyError, TypeError, IndexError, ValueError)

Event = dict[str, Any]
Abort = Callable[[str, Sequence[str]], Coroutine[Any, Any, None]]  # of rids, at a server's URL


class RefusedInCompany(GenerationFailed):
    """The server refused a call of several groups, and does not say because of which."""


class Part:
    """One group's share of a call. `left`: members without a finished event, by rid."""

    def __init__(self, request: GenerateRequest):
        self.request = request
        self.left = {member.rid: member for member in request.members}
        self._events: list[tuple[MemberRequest, Event]] = []
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    async def arrived(self) -> list[tuple[MemberRequest, Event]]:
        """The finished events since the last call, one at least; none when every member has had its own. Raises what ended the
        call, once the events before it are taken."""
        while not self._events:
            if not self.left:
                return []
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        events, self._events = self._events, []
        return events

    def take(self, member: MemberRequest, event: Event) -> None:
        if self.left.pop(member.rid, None):
            self._events.append((member, event))
            self._changed.set()

    def fail(self, error: BaseException) -> None:
        """No further event comes. The first reason stands."""
        self._failure = self._failure or error
        self._changed.set()

    def again(self) -> None:
        """What is left is about to be asked for in another call."""
        self._failure = None


class SharedCall:
    """One POST /generate. Parts join until it is sent, in the next turn of the event loop. `is_alone`: one part only;
    `prefix_key`: what keeps apart the prefixes that a server caches under different weights."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: ServerView,
        abort: Abort,
        *,
        prefix_key: str,
        is_alone: bool = False,
    ):
        self._session, self._server, self._abort, self._is_alone = session, server, abort, is_alone
        self._prefix_key = prefix_key
        self._parts: list[Part] = []  # those that are still here
        self._places: list[tuple[Part, MemberRequest]] = []  # by index in the stream
        self._num_members = 0
        self._is_sent = False
        self._answered = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"generate on {server.name}")

    @property
    def task(self) -> asyncio.Task[None]:
        return self._task

    def admits(self, server: ServerView, part: Part, prefix_key: str) -> bool:
        is_open = not (self._is_sent or self._is_alone or self._task.cancelling())
        is_same = (server, prefix_key) == (self._server, self._prefix_key)
        return is_open and is_same and self._num_members + len(part.left) <= MAX_MEMBERS

    def join(self, part: Part) -> None:
        assert not self._is_sent
        self._parts.append(part)
        self._num_members += len(part.left)

    def leave(self, part: Part) -> Coroutine[Any, Any, None] | None:
        """The part wants nothing more. Returns what somebody has to await, off the part's own way out."""
        self._parts.remove(part)
        if self._task.done():
            return None
        if self._parts:
            return self._abort_left(part) if part.left and self._is_sent else None
        if part.left:
            self._task.cancel()  # closes the connection: the server sees it, and ends what is left
        else:  # the end of the stream is still to be read, and then the connection serves again
            timer = asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._task.cancel)
            self._task.add_done_callback(lambda _: timer.cancel())
        return None

    async def _abort_left(self, part: Part) -> None:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self._answered.wait()  # the server may not have known them before
        except TimeoutError:
            return  # it never answered, and the call's last part closes the connection
        await self._abort(self._server.url, list(part.left))

    async def _run(self) -> None:
        """Every part that is here gets all its events, or a failure."""
        self._is_sent = True
        self._places = [(part, member) for part in self._parts for member in part.left.values()]
        failure: BaseException = GenerationFailed("the connection was given up")
        try:
            failure = await self._exchange(len(self._parts) > 1)
        except (aiohttp.ClientError, OSError, TimeoutError, GenerationFailed) as error:
            failure = error
        except NOT_SGLANG as error:
            failure = GenerationFailed(f"its answer is not SGLang's: {type(error).__name__}: {error}")
        finally:
            self._answered.set()
            for part in self._parts:
                part.fail(failure)

    async def _exchange(self, in_company: bool) -> BaseException:
        """Ask, and share out the answer. Returns what is to be said to a part that has not got all."""
        body = orjson.dumps(_payload(self._parts, self._prefix_key))
        response = await self._session.post(f"{self._server.url}/generate", data=body, headers=HEADERS)
        self._answered.set()
        try:
            if response.status != 200:
                text = f"HTTP {response.status}: {(await response.text())[:500]}"
                raise RefusedInCompany(text) if in_company and 400 <= response.status < 500 else GenerationFailed(text)
            async with aclosing(_events(response.content)) as events:
                async for event in events:
                    self._share_out(event, in_company)
            return GenerationFailed(f"the stream ended with {self._num_left} of {len(self._places)} responses outstanding")
        finally:
            response.close()  # of a response that was read to its end, the connection lives on

    def _share_out(self, event: Event, in_company: bool) -> None:
        if "error" in event:
            text = f"the server says: {event['error']}"
            raise RefusedInCompany(text) if in_company else GenerationFailed(text)
        if event["meta_info"].get("finish_reason") is not None:
            part, member = self._places[event.get("index", 0)]
            part.take(member, event)

    @property
    def _num_left(self) -> int:
        return sum(member.rid in part.left for part, member in self._places)


def _payload(parts: Sequence[Part], prefix_key: str) -> dict[str, Any]:
    input_ids: list[list[int]] = []
    sampling_params: list[dict[str, Any]] = []
    rids: list[str] = []
    for part in parts:
        shared = _sampling(part.request)
        input_ids += [part.request.prompt_tokens.tolist()] * len(part.left)
        sampling_params += [{**shared, "sampling_seed": member.seed} for member in part.left.values()]
        rids += part.left
    return {
        "input_ids": input_ids,
        "sampling_params": sampling_params,
        "rid": rids,
        "extra_key": prefix_key,
        "return_logprob": True,
        "stream": True,
    }


def _sampling(request: GenerateRequest) -> dict[str, Any]:
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
    return shared


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[Event, None]:
    """The JSON objects of a server-sent event stream, up to [DONE]. No deadline: those who wait have theirs, and then end it."""
    rest = b""
    while chunk := await content.readany():
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                await content.read()
                return
            yield orjson.loads(data)
