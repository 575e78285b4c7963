"""Which server a request goes to: the one that has its conversation, else the least loaded, and none past what it can serve."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from asyncrl.engines.client import FleetClient
from asyncrl.protocols import ServerLoad
from tests.engines.test_client_losses import MortalServer, assert_whole, collect, group, view
from tests.waiting import until


async def test_turns_of_a_conversation_go_to_one_server_and_move_on_when_it_is_gone():
    async with MortalServer().serving() as one, MortalServer().serving() as other:
        client = FleetClient(view(one, other))
        for turn in range(4):
            await collect(client, replace(group(members=1, seed=turn), conversation="talk"))
        assert sorted([len(one.calls), len(other.calls)]) == [0, 4]
        home = one if one.calls else other
        away = other if home is one else one
        client.update(replace(view(one, other), seq=2, servers=tuple(
            replace(server, state="STALE") if server.url == home.url else server for server in view(one, other).servers
        )))  # fmt: skip
        await collect(client, replace(group(members=1, seed=9), conversation="talk"))
        assert len(away.calls) == 1
        await client.close()


async def test_a_server_that_says_it_is_full_is_asked_for_no_more_than_it_can_serve():
    async with MortalServer().serving() as server:
        server.hold.clear()
        client = FleetClient(view(server), is_embedded=False, max_batch=16)
        loaded = replace(view(server).servers[0], load=ServerLoad(running=16, waiting=16, kv_use=0.5))
        client.update(replace(view(server), seq=2, servers=(loaded,)))  # the limit falls from 16 to 12
        requests = [group(members=4, seed=10 * number) for number in range(5)]
        asked = [asyncio.create_task(collect(client, request)) for request in requests]
        await until(lambda: sum(client._load.values()) == 12)
        await asyncio.sleep(0.05)
        assert sum(client._load.values()) == 12
        server.hold.set()
        for request, completions in zip(requests, await asyncio.gather(*asked), strict=True):
            assert_whole(completions, request)
        await client.close()
