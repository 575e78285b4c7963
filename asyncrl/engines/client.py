"""The client of one or more inference servers that speak SGLang's protocol: one completion per member, groups share calls.

generate ─▶ route (the conversation's, or least loaded with room) ─▶ shared call ─▶ a completion per finished member
               ▲       ▲                                                │
update(view) ──┘       └── server lost: on with the tokens it has ──────┤
                           anything else that goes wrong: completions with `failure`
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp

from asyncrl.engines.responses import MALFORMED, UNTRAINED, Outdated, Response
from asyncrl.engines.shared_call import (
    ABORT_SECONDS,
    Part,
    RefusedInCompany,
    ServerLost,
    SharedCall,
    not_sglang,
)
from asyncrl.errors import GenerationFailed
from asyncrl.protocols import Completion, FleetView, GenerateRequest, PolicyVersion, ServerLoad, ServerView
from asyncrl.protocols.inference import failed_completion
from asyncrl.scheduling.concurrency import ConcurrencyLimit

log = logging.getLogger(__name__)
CONNECT_SECONDS = 10.0
MAX_CONVERSATIONS = 65_536  # remembered, the newest
LOWEST = 8  # responses that a server is always asked for, whatever it reports
MAX_LOSSES = 5  # servers that a response may lose one after the other without a token: then it may be what kills them
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0  # a lost server that still stands in the view is left alone so long
Failures = (GenerationFailed, TimeoutError)


def fixed_fleet(urls: Mapping[str, str]) -> FleetView:
    """A view of servers that nobody synchronises: all READY, version unknown."""
    servers = tuple(ServerView(name, url, "READY", None) for name, url in urls.items())
    return FleetView(seq=0, incarnation=0, confirmed=None, published=None, servers=servers)


@dataclass
class _Pause:
    """A server that was lost, `times` in a row, is asked for nothing before `until` (the event loop's time)."""

    url: str
    times: int
    until: float


class _Asked:
    """One group under way. `server`: the one that is asked now; `aborted`: members that go on nowhere."""

    def __init__(self, part: Part, deadline: float):
        self.part, self.deadline = part, deadline
        self.server: ServerView | None = None
        self.aborted: set[str] = set()
        self._last: tuple[ServerView, ServerLost] | None = None

    @property
    def name(self) -> str:
        """Of the server that is asked, or was last."""
        if self.server is not None:
            return self.server.name
        return self._last[0].name if self._last else self.part.request.server or ""

    def lost(self, server: ServerView, loss: ServerLost, incarnation: int) -> None:
        self.server = None
        if loss.was_reached or self._last is None:  # that a dead one cannot be reached says less than how it died
            self._last = (server, loss)
        for response in self.part.left.values():
            response.keep(incarnation, is_suspect=loss.is_suspect)

    def ended_without_a_server(self) -> list[Completion]:
        """What no server need be asked for again: aborted, complete, or lost too often."""
        ended = [(rid, end) for rid, response in self.part.left.items() if (end := self._end_of(rid, response)) is not None]
        for rid, _ in ended:
            del self.part.left[rid]
        return [completion for _, completion in ended]

    def _end_of(self, rid: str, response: Response) -> Completion | None:
        if rid in self.aborted:
            return failed_completion(response.member.index, self.name, "aborted: aborted by request", reason="abort")
        if response.num_in_hand >= self.part.request.sampling.max_new_tokens:
            return response.in_hand(self.name)
        if response.losses >= MAX_LOSSES:
            what = f"{response.losses} servers were lost in a row while they had this request, the last: {self._why()}"
            return failed_completion(response.member.index, self.name, what)
        return None

    def explain(self, error: BaseException) -> str:
        seconds = self.part.request.timeout_seconds
        if not isinstance(error, TimeoutError):
            return f"server {self.name}: {error}" if self.server is not None else str(error)
        if self.server is not None:
            return f"server {self.name} did not finish within {seconds:g} s"
        return f"no server took traffic within {seconds:g} s" + (f", after one was lost: {self._why()}" if self._last else "")

    def _why(self) -> str:
        return f"server {self._last[0].name}: {self._last[1]}" if self._last else ""


class FleetClient:
    """`protocols.InferenceEngine` over HTTP. `update` tells it which servers there are and which take traffic;
    `token` is what they ask for.

    A member whose server is lost (connection gone, HTTP 5xx, DEAD in the view) goes on at another one, or at the same one once
    that takes traffic again, with the tokens, log-probs and versions that it has, until the request's own deadline. With
    batch-invariant servers of one version the response is the one that an undisturbed server gives. is_embedded: the servers are
    the embedded engine; SGLang's draw the rest of such a response afresh.
    """

    def __init__(
        self,
        view: FleetView | None = None,
        *,
        is_embedded: bool = True,
        token: str | None = None,
        max_batch: int | None = None,
    ):
        """max_batch: responses that one server computes at once; with it a server that says how much it has to do is asked for as
        many as it can serve, else for all."""
        self._view = view or fixed_fleet({})
        self._open = [server for server in self._view.servers if server.takes_traffic]
        self._is_embedded = is_embedded
        self._changed = asyncio.Event()
        self._is_closed = False
        self._load: dict[str, int] = {}
        self._max_batch = max_batch
        self._limits: dict[str, ConcurrencyLimit] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()  # conversation to the server that had its last turn
        self._wanted: dict[str, _Asked] = {}  # rid to the group that it belongs to
        self._pauses: dict[str, _Pause] = {}
        self._session: aiohttp.ClientSession | None = None
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else None
        self._calls: dict[str, SharedCall] = {}  # the newest, by server
        self._background: set[asyncio.Task[None]] = set()  # calls and aborts

    def update(self, view: FleetView) -> None:
        """The newest view of the fleet; calls that wait for a server look again, and those on one that died leave it."""
        before, self._view = {server.name: server for server in self._view.servers}, view
        self._open = [server for server in view.servers if server.takes_traffic]
        for server in view.servers:
            known = before.get(server.name)
            if known is not None and (known.url != server.url or server.state == "DEAD" != known.state):
                self._give_up(known, "it is silent" if known.url == server.url else f"it is at {server.url} now")
            if server.takes_traffic and (known is None or not known.takes_traffic or known.url != server.url):
                self._pauses.pop(server.name, None)
            if server.load is not None and (known is None or known.load != server.load):
                self._note_load(server.name, server.load)
        self._look_again()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[Completion], None]:
        """One completion per member, each as it finishes, those that finish at once together. Leaving the iterator early aborts
        the rest on the server."""
        asked = _Asked(Part(request), asyncio.get_running_loop().time() + request.timeout_seconds)
        timer = asyncio.get_running_loop().call_at(asked.deadline, asked.part.expire)
        self._wanted.update(dict.fromkeys(asked.part.left, asked))
        try:
            while asked.part.left:
                if (server := await self._route(asked)) is not None:
                    try:
                        async with aclosing(self._generate_on(server, asked)) as finished:
                            async for completions in finished:
                                yield completions
                    except ServerLost as loss:
                        self._pause(server, loss)
                        asked.lost(server, loss, self._view.incarnation)
                if ended := asked.ended_without_a_server():
                    yield ended
        except Failures as error:
            failure, left = asked.explain(error), asked.part.left.values()
            if left:
                yield [failed_completion(response.member.index, asked.name, failure) for response in left]
        finally:
            timer.cancel()
            for member in request.members:
                self._wanted.pop(member.rid, None)

    async def abort(self, rids: Sequence[str]) -> None:
        """Ask the servers that have these requests to end them; what waits for a server ends at once, and what a server loses
        goes on nowhere."""
        by_url: dict[str, list[str]] = {}
        for rid in rids:
            asked = self._wanted.get(rid)
            if asked is None or rid not in asked.part.left:
                continue
            asked.aborted.add(rid)
            if asked.server is not None:
                by_url.setdefault(asked.server.url, []).append(asked.part.left[rid].rid)
        self._look_again()
        await asyncio.gather(*(self._abort_on(url, mine) for url, mine in by_url.items()))

    async def close(self) -> None:
        """Whatever is under way fails."""
        self._is_closed = True
        self._look_again()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Routing

    async def _route(self, asked: _Asked) -> ServerView | None:
        """The least loaded server that takes traffic, or the one wanted by name; waits for it until the deadline. None when a
        member was aborted meanwhile."""
        wanted, now = asked.part.request.server, asyncio.get_running_loop().time
        while not asked.aborted & asked.part.left.keys():
            if self._is_closed:
                raise GenerationFailed("the client was closed")
            servers = [server for server in self._open if wanted in (None, server.name)]
            look_at = asked.deadline
            if self._pauses:
                ends = {server.name: self._pause_end(server) for server in servers}
                servers = [server for server in servers if ends[server.name] <= now()]
                look_at = min(ends.values(), default=look_at) if not servers else look_at
            servers = [server for server in servers if self._has_room(server.name, len(asked.part.left))]
            if servers:
                return self._chosen(servers, asked.part.request.conversation)
            await self._wait_until(look_at, asked.deadline)
        return None

    def _chosen(self, servers: Sequence[ServerView], conversation: str | None) -> ServerView:
        """The one that had the conversation's last turn, and else the least loaded."""
        home = self._homes.get(conversation) if conversation is not None else None
        server = next((server for server in servers if server.name == home), None)
        server = server or min(servers, key=lambda server: self._load.get(server.name, 0))
        if conversation is not None:
            self._homes[conversation] = server.name
            self._homes.move_to_end(conversation)
            if len(self._homes) > MAX_CONVERSATIONS:
                self._homes.popitem(last=False)
        return server

    def _has_room(self, name: str, wanted: int) -> bool:
        """Whether a server may be asked for so many more. An idle one always may: a group need not fit its limit."""
        limit, asked = self._limits.get(name), self._load.get(name, 0)
        return limit is None or not asked or asked + wanted <= limit.limit

    def _note_load(self, name: str, load: ServerLoad) -> None:
        if self._max_batch is None:
            return
        limit = self._limits.get(name)
        if limit is None:
            start = self._max_batch
            limit = self._limits[name] = ConcurrencyLimit(start=start, lowest=min(LOWEST, start), highest=2 * start)
        limit.reported(running=load.running, waiting=load.waiting, kv_use=load.kv_use)

    def _finished(self, name: str, number: int) -> None:
        """So many responses of this server are there, and whoever waits for room looks again."""
        limit = self._limits.get(name)
        if limit is not None:
            for _ in range(number):
                limit.finished(asked=self._load[name])
            self._look_again()

    async def _wait_until(self, moment: float, deadline: float) -> None:
        """For a change, or until `moment` comes. Raises TimeoutError once the deadline has passed."""
        try:
            async with asyncio.timeout_at(min(moment, deadline)):
                await self._changed.wait()
        except TimeoutError:
            if asyncio.get_running_loop().time() >= deadline:
                raise

    def _look_again(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _pause(self, server: ServerView, loss: ServerLost) -> None:
        """Let a lost server be, for longer each time, until the view says that it is back. Every group on it sees the loss; it
        counts once."""
        now, known = asyncio.get_running_loop().time(), self._pauses.get(server.name)
        if known is not None and known.url != server.url:
            known = None
        if known is not None and now < known.until:
            return
        times = 1 + (known.times if known is not None else 0)
        seconds = min(FIRST_PAUSE_SECONDS * 2 ** (times - 1), LONGEST_PAUSE_SECONDS)
        self._pauses[server.name] = _Pause(server.url, times, now + seconds)
        if times == 1:
            log.warning("%s was lost (%s): its requests go on elsewhere with the tokens they have", server.name, loss)

    def _pause_end(self, server: ServerView) -> float:
        known = self._pauses.get(server.name)
        return known.until if known is not None and known.url == server.url else 0.0

    def _give_up(self, server: ServerView, why: str) -> None:
        """What is asked of this server goes on elsewhere."""
        for asked in {id(asked): asked for asked in self._wanted.values()}.values():
            if asked.server is not None and (asked.server.name, asked.server.url) == (server.name, server.url):
                asked.part.fail(ServerLost(why))

    # Asking

    async def _generate_on(self, server: ServerView, asked: _Asked) -> AsyncGenerator[list[Completion], None]:
        """Completions as the server sends them. Raises one of `Failures` when it stops doing so."""
        part, unused = asked.part, len(asked.part.left)
        asked.server = server
        self._load[server.name] = self._load.get(server.name, 0) + unused
        call = self._join(server, part)
        try:
            while True:
                try:
                    finished = await part.finished()
                except RefusedInCompany:
                    self._leave(call, part)
                    call = self._join(server, part, is_alone=True)
                    continue
                if not finished:
                    return
                unused -= len(finished)
                self._finished(server.name, len(finished))
                self._load[server.name] -= len(finished)
                if self._pauses:
                    self._pauses.pop(server.name, None)
                completions, outdated = self._completions(finished, server, part)
                if completions:
                    yield completions
                if outdated is not None:
                    raise ServerLost(outdated, is_suspect=False)
        finally:
            self._load[server.name] -= unused
            if self._limits:
                self._look_again()
            self._leave(call, part)

    def _completions(
        self, finished: Iterable[tuple[Response, Mapping[str, Any]]], server: ServerView, part: Part
    ) -> tuple[list[Completion], str | None]:
        """What can be used of what finished, and why some of it cannot: that is asked for again."""
        completions, outdated = [], None
        limit = part.request.sampling.max_new_tokens
        for response, finish in finished:
            try:
                completions.append(
                    response.completion(finish, server=server.name, incarnation=self._view.incarnation, max_new_tokens=limit)
                )
            except Outdated as error:
                part.put_back(response)
                outdated = str(error)
            except MALFORMED as error:
                failure = f"server {server.name}: {not_sglang(error)}"
                completions.append(failed_completion(response.member.index, server.name, failure))
        return completions, outdated

    def _join(self, server: ServerView, part: Part, *, is_alone: bool = False) -> SharedCall:
        """The call that is about to be sent to this server, or a new one."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                timeout=timeout, connector=connector, headers=self._headers, cookie_jar=aiohttp.DummyCookieJar()
            )
        incarnation = self._view.incarnation
        call, prefix_key = self._calls.get(server.name), f"weights {incarnation}.{server.version}"
        if is_alone or call is None or not call.admits(server, part, prefix_key):
            call = SharedCall(
                self._session,
                server,
                self._abort_on,
                prefix_key=prefix_key,
                is_alone=is_alone,
                is_embedded=self._is_embedded,
            )
            self._calls[server.name] = call
            self._keep(call.task)
        part.again(PolicyVersion(incarnation, server.version) if server.version is not None else UNTRAINED)
        call.join(part)
        return call

    def _leave(self, call: SharedCall, part: Part) -> None:
        if (abort := call.leave(part)) is not None:
            self._keep(asyncio.get_running_loop().create_task(abort))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)

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
