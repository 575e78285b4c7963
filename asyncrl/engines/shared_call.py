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
request that cannot be served does not fail its neighbours. What had arrived when a server is lost stays with each part.

The protocol is SGLang's. The embedded engine knows two fields more: `incremental` (a chunk holds what no chunk before it held)
and `seed_offset` (so many tokens of the response end the prompt: what follows is drawn as if they had been drawn here).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp
import orjson

from asyncrl.engines.responses import MALFORMED, Response
from asyncrl.errors import GenerationFailed
from asyncrl.protocols import GenerateRequest, PolicyVersion, ServerView

MAX_MEMBERS = 1024  # responses in one call
ABORT_SECONDS = 10.0
DRAIN_SECONDS = 10.0
CHUNK_TOKENS = 64  # what a lost server costs at most, of each response; a chunk of them costs less than one decode step
SGLANG_CHUNK_TOKENS = 256  # one that asyncrl did not start may send all tokens so far with every chunk
GONE_OR_FULL = 503  # the HTTP status of a server that ends, or has no room
HEADERS = {"Content-Type": "application/json"}
DONE = b"[DONE]"

Event = dict[str, Any]
Abort = Callable[[str, Sequence[str]], Coroutine[Any, Any, None]]  # of rids, at a server's URL


class RefusedInCompany(GenerationFailed):
    """The server refused a call of several groups, and does not say because of which."""


class ServerLost(GenerationFailed):
    """The server died, was killed or cannot be reached: others go on with what it had sent. `was_reached`: it had the request;
    `is_suspect`: and may have been lost because of it."""

    def __init__(self, text: str, *, is_suspect: bool = True, was_reached: bool = True):
        self.is_suspect, self.was_reached = is_suspect and was_reached, was_reached
        super().__init__(text)


class Part:
    """One group's share of a call. `left`: members without a finished event, by the request ids of the caller."""

    def __init__(self, request: GenerateRequest):
        self.request = request
        self.left = {member.rid: Response(member) for member in request.members}
        self._finished: list[tuple[Response, Event]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._is_expired = False

    async def finished(self) -> list[tuple[Response, Event]]:
        """The responses that finished since the last call, one at least, with their reasons; none when every member has had its
        own. Raises what ended the call, once those before it are taken."""
        while not self._finished:
            if not self.left:
                return []
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        finished, self._finished = self._finished, []
        return finished

    def take(self, response: Response, event: Event) -> None:
        """A chunk of one member's response."""
        rid = response.member.rid
        if self._failure is not None or self.left.get(rid) is not response:
            return
        try:
            response.add(event)
            finish = event["meta_info"].get("finish_reason")
            lost = finish is not None and finish["type"] == "abort" and (finish.get("status_code") or 0) >= 500
        except MALFORMED as error:
            self.fail(not_sglang(error))
            return
        if lost:
            self.fail(ServerLost(f"it says: {finish.get('message')}", is_suspect=finish["status_code"] != GONE_OR_FULL))
        elif finish is not None:
            del self.left[rid]
            self._finished.append((response, finish))
            self._wake()

    def put_back(self, response: Response) -> None:
        """What finished cannot be used, and is to be asked for again."""
        self.left[response.member.rid] = response

    def fail(self, error: BaseException) -> None:
        """No further event comes. The first reason stands."""
        self._failure = self._failure or error
        self._wake()

    def expire(self) -> None:
        """The deadline has passed, here and in every call to come."""
        self._is_expired = True
        self.fail(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def again(self, holds: PolicyVersion) -> None:
        """What is left is about to be asked for in another call, of a server that has this version."""
        self._failure = TimeoutError() if self._is_expired else None
        for response in self.left.values():
            response.ask(holds)


def not_sglang(error: Exception) -> GenerationFailed:
    return GenerationFailed(f"its answer is not SGLang's: {type(error).__name__}: {error}")


class SharedCall:
    """One POST /generate. Parts join until it is sent, in the next turn of the event loop. `is_alone`: one part only;
    `prefix_key`: what keeps apart the prefixes that a server caches under different weights; `is_embedded`: the server knows the
    fields that SGLang does not."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: ServerView,
        abort: Abort,
        *,
        prefix_key: str,
        is_alone: bool = False,
        is_embedded: bool = True,
    ):
        self._session, self._server, self._abort, self._is_alone = session, server, abort, is_alone
        self._prefix_key, self._is_embedded = prefix_key, is_embedded
        self._parts: list[Part] = []  # those that are still here
        self._places: list[tuple[Part, Response, int]] = []  # by index in the stream; the int is the response's turn
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
            return self._abort_left([response.rid for response in part.left.values()]) if part.left and self._is_sent else None
        if part.left:
            self._task.cancel()  # closes the connection: the server sees it, and ends what is left
        else:  # the end of the stream is still to be read, and then the connection serves again
            timer = asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._task.cancel)
            self._task.add_done_callback(lambda _: timer.cancel())
        return None

    async def _abort_left(self, rids: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self._answered.wait()  # the server may not have known them before
        except TimeoutError:
            return  # it never answered, and the call's last part closes the connection
        await self._abort(self._server.url, rids)

    async def _run(self) -> None:
        """Every part that is here gets all its events, or a failure."""
        self._is_sent = True
        self._places = [(part, response, response.turn) for part in self._parts for response in part.left.values()]
        failure: BaseException = GenerationFailed("the connection was given up")
        try:
            failure = await self._exchange(len(self._parts) > 1)
        except GenerationFailed as error:
            failure = error
        except aiohttp.InvalidURL as error:
            failure = GenerationFailed(f"its URL is none: {error}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            was_reached = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            failure = ServerLost(str(error) or type(error).__name__, was_reached=was_reached)
        except MALFORMED as error:
            failure = not_sglang(error)
        finally:
            self._answered.set()
            for part in self._parts:
                part.fail(failure)

    async def _exchange(self, in_company: bool) -> BaseException:
        """Ask, and share out the answer. Returns what is to be said to a part that has not got all."""
        body = orjson.dumps(self._payload())
        response = await self._session.post(f"{self._server.url}/generate", data=body, headers=HEADERS)
        self._answered.set()
        try:
            if response.status != 200:
                raise _refusal(response.status, (await response.text())[:500], in_company)
            async with aclosing(_events(response.content)) as events:
                async for chunk in events:
                    for event in chunk:
                        self._share_out(event, in_company)
            return ServerLost(f"the stream ended with {self._num_left} of {len(self._places)} responses outstanding")
        finally:
            response.close()  # of a response that was read to its end, the connection lives on

    def _share_out(self, event: Event, in_company: bool) -> None:
        if "error" in event:
            text = f"the server says: {event['error']}"
            raise RefusedInCompany(text) if in_company else GenerationFailed(text)
        part, response, turn = self._places[event.get("index", 0)]
        if response.turn == turn:  # else another server is asked for it by now
            part.take(response, event)

    @property
    def _num_left(self) -> int:
        return sum(part.left.get(response.member.rid) is response for part, response, _ in self._places)

    def _payload(self) -> dict[str, Any]:
        input_ids: list[list[int]] = []
        sampling_params: list[dict[str, Any]] = []
        rids: list[str] = []
        is_long = False
        for part in self._parts:
            prompt, shared = part.request.prompt_tokens.tolist(), self._sampling(part.request)
            for response in part.left.values():
                own = {**shared, "sampling_seed": response.member.seed}
                if had := response.num_in_hand:
                    own["max_new_tokens"] -= had
                    if self._is_embedded:
                        own["seed_offset"] = had
                input_ids.append(prompt + response.token_ids() if had else prompt)
                sampling_params.append(own)
                rids.append(response.rid)
            is_long = is_long or part.request.sampling.max_new_tokens > CHUNK_TOKENS
        return {
            "input_ids": input_ids,
            "sampling_params": sampling_params,
            "rid": rids,
            "extra_key": self._prefix_key,
            "return_logprob": True,
            "stream": True,
            **({"incremental": True} if is_long and self._is_embedded else {}),
        }

    def _sampling(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        shared: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "stream_interval": CHUNK_TOKENS if self._is_embedded else SGLANG_CHUNK_TOKENS,
        }
        if sampling.stop_token_ids:
            shared["stop_token_ids"] = list(sampling.stop_token_ids)
        return shared


def _refusal(status: int, text: str, in_company: bool) -> GenerationFailed:
    said = f"HTTP {status}: {text}"
    if status >= 500:
        return ServerLost(said, is_suspect=status != GONE_OR_FULL)
    return RefusedInCompany(said) if in_company and status >= 400 else GenerationFailed(said)


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[Iterator[Event], None]:
    """The JSON objects of a server-sent event stream, up to [DONE], those that came at once together. No deadline: those who wait
    have theirs, and then end it."""
    rest = b""
    while chunk := await content.readany():
        *blocks, rest = (rest + chunk).split(b"\n\n")
        texts = [block.removeprefix(b"data:").strip() for block in blocks]
        if DONE in texts:
            yield map(orjson.loads, texts[: texts.index(DONE)])
            await content.read()
            return
        yield map(orjson.loads, texts)
