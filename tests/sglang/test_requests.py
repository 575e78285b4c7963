"""What a real server does with the ids of requests: it ends those that begin alike, and ends a call's once more after its end."""

from __future__ import annotations

import asyncio

from tests.sglang.servers import ask, request

PROMPT = [5, 6, 7, 8, 9]


async def test_a_request_that_is_asked_for_again_is_not_ended_by_the_end_of_the_first(shared):
    client = shared.client()
    try:
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 3.5:  # one is under way when an earlier one's two seconds are over
            found = await ask(client, request(PROMPT, members=4, tokens=240, name="again"))
            assert {len(completion.token_ids) for completion in found} == {240}
    finally:
        await client.close()


async def test_a_member_that_is_ended_takes_no_sibling_along(shared):
    client = shared.client()
    wanted = request(PROMPT, members=12, tokens=240, name="group")
    try:
        asked = asyncio.ensure_future(_collected(client, wanted))
        await asyncio.sleep(0.3)
        await client.abort([wanted.members[1].rid])  # 10 and 11 begin as it does
        found = sorted(await asked, key=lambda completion: completion.index)
        assert [completion.index for completion in found if completion.finish_reason != "length"] == [1]
    finally:
        await client.close()


async def _collected(client, wanted):
    return [completion async for part in client.generate(wanted) for completion in part]
