"""An SGLang server of a run: its owner. The server is a child process, or was started by somebody else and is watched.

    rollouter ──http──▶ SGLang server ◀──weights── ParameterSync
                            ▲ starts, watches, starts again, ends
                        SglangServer (this process)

| loop  | consumes            | waits for                       | is unblocked by                       |
|-------|---------------------|---------------------------------|---------------------------------------|
| run   | –                   | the server's end, or `stop`     | the kernel; `stop`                    |
| watch | what servers report | the next look, by a deadline    | time                                  |

A server that ends by itself is started again here, at the same addresses, and its requests go on elsewhere meanwhile. One that
ends again and again is given up: the run goes on with the others, and ends when there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from asyncrl.clock import Clock
from asyncrl.engines.sglang.process import Address
from asyncrl.errors import AsyncrlError
from asyncrl.protocols import Tracker
from asyncrl.services.service import NOWHERE, AddressBook, service_rpc
from asyncrl.services.tasks import cancel
from asyncrl.transport.rpc import RpcClient

log = logging.getLogger(__name__)
RESTARTS = 5  # in a row, each before the server has served for SOUND_SECONDS
SOUND_SECONDS = 60.0
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.5, 15.0
LOOK_SECONDS, ASK_SECONDS = 1.0, 2.0
LOOKS_PER_RECORD = 5


class ServerProcess(Protocol):
    """One life of a server. `start` raises UserError for what cannot serve, RunError for a server that ended at once."""

    async def start(self, seconds: float) -> None: ...

    async def wait(self) -> str:
        """Until it has ended by itself; how."""

    async def load(self) -> Mapping[str, float]:
        """What it reports of its work, for `status`."""

    async def end(self) -> None:
        """Nothing of it is left."""


class Servers(Protocol):
    """The row's servers, one life after the other."""

    def address(self, earlier: Mapping[str, str]) -> Address:
        """Where they listen; earlier: where they did, by kind, for an earlier process of the row."""

    async def examine(self) -> None:
        """Raise UserError where such a server cannot be had here."""

    def told(self, address: Address) -> dict[str, str]:
        """Where others reach it, by kind."""

    def make(self, address: Address) -> ServerProcess:
        """One of them, not started."""


class SglangServer:
    """Service of row `inference/i`."""

    def __init__(
        self, name: str, servers: Servers, make_tracker: Callable[[AddressBook], Tracker], *, start_seconds: float, clock: Clock
    ):
        """make_tracker: called in `run`, with everybody's addresses."""
        self.name, self._make_tracker = name, make_tracker
        self._servers, self._start_seconds, self._clock = servers, start_seconds, clock
        self._rpc = service_rpc(self)
        self._stopping, self._retired = asyncio.Event(), asyncio.Event()
        self._state = "starting"
        self._reason = ""
        self._seen: dict[str, Any] = {}
        self._restarts = 0
        self._address: Address | None = None
        self._server: ServerProcess | None = None

    async def start(self, earlier: Mapping[str, str] = NOWHERE) -> dict[str, str]:
        await self._servers.examine()
        address = self._address = self._servers.address(earlier)
        self._server = self._servers.make(address)
        try:
            await self._server.start(self._start_seconds)
        except BaseException:
            await self._server.end()
            raise
        self._state = "serving"
        return {**self._servers.told(address), "rpc": await self._rpc.start(earlier.get("rpc"))}

    async def run(self, book: AddressBook) -> None:
        """Until `stop`."""
        sync, tracker = RpcClient(book["parameter_sync"]["rpc"]), self._make_tracker(book)
        looking = asyncio.create_task(self._look(sync, tracker))
        try:
            while not self._stopping.is_set():
                how = await self._until_it_ends()
                if self._retired.is_set():
                    await self._leave()
                elif how is not None and not await self._start_again(how, sync):
                    await self._give_up(sync)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            self._state = "stopped"
            if self._server is not None:
                await self._server.end()
            await sync.close()
            await tracker.close()
            await self._rpc.close()

    async def stop(self) -> None:
        self._stopping.set()

    def status(self) -> dict[str, Any]:
        told = {"state": self._state, "version": None, **self._seen, "restarts": self._restarts}
        return {**told, "reason": self._reason} if self._reason else told

    def summary(self) -> dict[str, Any]:
        return {"servers": {self.name: {**self._seen, "restarts": self._restarts}}}

    async def _until_it_ends(self) -> str | None:
        """How the server ended; None when it is to stop, or was taken out of the run."""
        assert self._server is not None, "start first"
        ends = asyncio.ensure_future(self._server.wait())
        others = [asyncio.ensure_future(event.wait()) for event in (self._stopping, self._retired)]
        try:
            await asyncio.wait([ends, *others], return_when=asyncio.FIRST_COMPLETED)
            is_unasked = not self._stopping.is_set() and not self._retired.is_set()
            return ends.result() if ends.done() and is_unasked else None
        finally:
            for waiting in (ends, *others):
                waiting.cancel()

    async def _start_again(self, how: str, sync: RpcClient) -> bool:
        """Whether the server serves again. Tries RESTARTS times in a row."""
        assert self._server is not None
        assert self._address is not None
        for attempt in range(RESTARTS):
            self._state, self._reason, self._seen = "restarting", how, {}
            log.error("%s", how)
            with contextlib.suppress(AsyncrlError):  # one that is away sees by itself that the server is
                await sync.call("restarting_server", timeout=ASK_SECONDS, name=self.name, reason=how.splitlines()[0])
            await self._server.end()
            await self._pause(0.0 if not attempt else min(FIRST_DELAY_SECONDS * 2**attempt, LONGEST_DELAY_SECONDS))
            if self._stopping.is_set():
                return True
            self._server = self._servers.make(self._address)
            self._restarts += 1
            try:
                is_wanted = await self._unless_it_is_to_stop(self._server.start(self._start_seconds))
            except AsyncrlError as error:
                how = str(error)
                continue
            if not is_wanted:
                return True
            self._state, self._reason = "serving", ""
            served_since = self._clock.now()
            ended = await self._until_it_ends_within(SOUND_SECONDS)
            if ended is None:
                return True
            how = f"{ended}\n({self._clock.now() - served_since:.0f} s after it was started again)"
        self._reason = how
        return False

    async def _unless_it_is_to_stop(self, start: Coroutine[Any, Any, None]) -> bool:
        """Whether the start came to its end before somebody wanted the row to."""
        starting = asyncio.ensure_future(start)
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([starting, stop], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            return starting.done()
        finally:
            await cancel([starting, stop])

    async def _until_it_ends_within(self, seconds: float) -> str | None:
        try:
            async with asyncio.timeout(seconds):
                return await self._until_it_ends()
        except TimeoutError:
            return None

    async def _give_up(self, sync: RpcClient) -> None:
        """This row serves no more. ParameterSync knows whether others do, and ends the run where none does."""
        assert self._server is not None
        self._state, self._seen = "dead", {}
        log.error("given up after %d restarts in a row: %s", RESTARTS, self._reason)
        await self._server.end()
        await sync.call("give_up_server", timeout=self._start_seconds, name=self.name, reason=self._reason)
        await self._stopping.wait()

    async def _leave(self) -> None:
        """Taken out of the run, with nothing left to do."""
        assert self._server is not None
        self._state, self._seen = "retired", {}
        await self._server.end()
        await self._stopping.wait()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _look(self, sync: RpcClient, tracker: Tracker) -> None:
        """What the server and ParameterSync say of it, for `status`, and now and then for the tracker."""
        for look in itertools.count(1):
            await asyncio.sleep(LOOK_SECONDS)
            if look % LOOKS_PER_RECORD == 0 and self._seen:
                numbers = {name: value for name, value in self._seen.items() if isinstance(value, int | float)}
                tracker.log(self.name, look, {f"{self.name}/{name}": float(value) for name, value in numbers.items()})
            server = self._server
            if self._state != "serving" or server is None:
                continue
            seen: dict[str, Any] = dict(await server.load())
            load = [seen["running"], seen["waiting"], seen["kv_use"]] if seen else None
            with contextlib.suppress(AsyncrlError):
                seen |= await sync.call("server", timeout=ASK_SECONDS, name=self.name, load=load)
            fleet = seen.pop("fleet", None)
            if self._server is server and self._state == "serving":
                self._seen = {**self._seen, **seen}
            if fleet == "RETIRED" and not seen.get("running") and not seen.get("waiting"):
                self._retired.set()
