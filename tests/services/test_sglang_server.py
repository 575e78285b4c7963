"""The owner of an SGLang server: starts it again where it ends by itself, gives it up where it keeps ending, leaves with it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from asyncrl.clock import SystemClock
from asyncrl.engines.sglang.process import Address
from asyncrl.errors import RunError
from asyncrl.services import sglang_server
from asyncrl.services.sglang_server import RESTARTS, SglangServer
from asyncrl.tracking.memory import MemoryTracker
from asyncrl.transport.rpc import RpcClient, RpcServer
from tests.waiting import until

ADDRESS = Address("127.0.0.1", 31000, None, "tcp://127.0.0.1:31001")


class FakeProcess:
    def __init__(self, fails: bool):
        self._fails, self._ended = fails, asyncio.Event()
        self.is_up = False

    async def start(self, seconds: float) -> None:
        if self._fails:
            raise RunError("the SGLang server ended (exit code 1); its log ends:\nno memory")
        self.is_up = True

    async def wait(self) -> str:
        await self._ended.wait()
        return "the SGLang server ended (signal SIGKILL); its log ends:\n…"

    def die(self) -> None:
        self.is_up = False
        self._ended.set()

    async def load(self) -> dict[str, float]:
        return {"running": 0, "waiting": 0, "kv_use": 0.1} if self.is_up else {}

    async def end(self) -> None:
        self.is_up = False


class SlowProcess(FakeProcess):
    async def start(self, seconds: float) -> None:
        self.is_up = True
        await asyncio.sleep(seconds)


class FakeServers:
    """`failing`: lives, counted from 1, that end before they serve."""

    def __init__(self, failing=()):
        self._failing, self.lives = set(failing), []

    def address(self, earlier):
        return ADDRESS

    async def examine(self) -> None:
        pass

    def told(self, address):
        return {"http": address.url, "weights": address.receiver}

    def make(self, address):
        assert not any(life.is_up for life in self.lives), "one life at a time"
        self.lives.append(FakeProcess(len(self.lives) + 1 in self._failing))
        return self.lives[-1]


class FakeSync:
    """ParameterSync, as far as a server's owner speaks to it."""

    def __init__(self):
        self.said, self.fleet = [], "READY"
        self._rpc = RpcServer({
            "server": self._server,
            "restarting_server": lambda name, reason: self.said.append(("restarting", name, reason)),
            "give_up_server": lambda name, reason: self.said.append(("given up", name, reason)),
        })  # fmt: skip

    def _server(self, name, load):
        return {"version": 7, "fleet": self.fleet, "pause_ms": 0.4}

    @asynccontextmanager
    async def serving(self):
        yield {"parameter_sync": {"rpc": await self._rpc.start()}}
        await self._rpc.close()


@asynccontextmanager
async def running(servers: FakeServers, sync: FakeSync):
    owner = SglangServer("inference/1", servers, lambda book: MemoryTracker(), start_seconds=5, clock=SystemClock())
    addresses = await owner.start()
    async with sync.serving() as book:
        run = asyncio.create_task(owner.run(book))
        client = RpcClient(addresses["rpc"])
        try:
            yield owner, client
        finally:
            await client.close()
            await owner.stop()
            await run
            assert not any(life.is_up for life in servers.lives)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What takes minutes takes moments."""
    for name, seconds in {"SOUND_SECONDS": 0.2, "FIRST_DELAY_SECONDS": 0.001, "LOOK_SECONDS": 0.02}.items():
        monkeypatch.setattr(sglang_server, name, seconds)


async def test_a_server_serves_and_its_row_says_what_the_fleet_knows():
    async with running(FakeServers(), FakeSync()) as (_, client):

        async def is_told():
            return (await client.call("status", timeout=5)).get("version") == 7

        await until(is_told)
        status = await client.call("status", timeout=5)
        assert (status["state"], status["kv_use"], status["pause_ms"], status["restarts"]) == ("serving", 0.1, 0.4, 0)


async def test_a_server_that_dies_is_started_again_and_the_fleet_is_told():
    servers, sync = FakeServers(), FakeSync()
    async with running(servers, sync) as (owner, _):
        servers.lives[0].die()
        await until(lambda: len(servers.lives) == 2 and servers.lives[1].is_up)
        await until(lambda: owner.status()["state"] == "serving")
        assert sync.said == [("restarting", "inference/1", "the SGLang server ended (signal SIGKILL); its log ends:")]
        assert owner.status()["restarts"] == 1


async def test_a_server_that_served_long_enough_has_all_its_restarts_again():
    servers, sync = FakeServers(), FakeSync()
    async with running(servers, sync) as (owner, _):
        for life in range(2 * RESTARTS):
            await until(lambda life=life: len(servers.lives) > life and owner.status()["state"] == "serving")
            await asyncio.sleep(0.3)
            servers.lives[life].die()
        await until(lambda: len(servers.lives) == 2 * RESTARTS + 1 and owner.status()["state"] == "serving")
        assert [said[0] for said in sync.said] == ["restarting"] * 2 * RESTARTS


async def test_a_server_that_keeps_ending_is_given_up_by_name_and_its_row_stays():
    servers, sync = FakeServers(failing=range(2, 100)), FakeSync()
    async with running(servers, sync) as (owner, _):
        servers.lives[0].die()
        await until(lambda: sync.said[-1:] and sync.said[-1][0] == "given up")
        assert len(servers.lives) == 1 + RESTARTS
        assert sync.said[-1][1] == "inference/1"
        assert "no memory" in sync.said[-1][2]
        assert (owner.status()["state"], "no memory" in owner.status()["reason"]) == ("dead", True)


async def test_a_server_that_was_taken_out_of_the_run_is_ended_once_it_has_nothing_to_do():
    servers, sync = FakeServers(), FakeSync()
    async with running(servers, sync) as (owner, _):
        sync.fleet = "RETIRED"
        await until(lambda: owner.status()["state"] == "retired")
        assert not servers.lives[0].is_up
        assert sync.said == []


async def test_a_server_that_cannot_start_at_all_ends_the_start_with_its_words():
    owner = SglangServer(
        "inference/1", FakeServers(failing=[1]), lambda book: MemoryTracker(), start_seconds=5, clock=SystemClock()
    )
    with pytest.raises(RunError, match="no memory"):
        await owner.start()


async def test_a_row_that_is_to_stop_does_not_wait_until_its_server_has_started_again():
    servers = FakeServers()
    async with running(servers, FakeSync()) as _:
        servers.make = lambda address: servers.lives.append(SlowProcess(False)) or servers.lives[-1]
        servers.lives[0].die()
        await until(lambda: len(servers.lives) == 2 and servers.lives[1].is_up)
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < 2.5, "half of what the start may take"
