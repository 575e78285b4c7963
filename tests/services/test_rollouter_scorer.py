"""Evaluation's samples find the Reward front that there is."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from asyncrl.errors import DeadlineExceeded, RemoteError
from asyncrl.services.rollouter import RpcScorer
from asyncrl.transport.rpc import RpcClient, RpcServer

ITEMS = [{"response": "yes"}, {"response": "no"}]


class Front:
    """Answers once `open` is set."""

    def __init__(self, name, *, is_open=True):
        self.name, self.asked, self.open = name, asyncio.Event(), asyncio.Event()
        if is_open:
            self.open.set()
        self._server = RpcServer({"score": self.score, "incarnation": lambda: name})

    async def start(self, address=None):
        return await self._server.start(address)

    async def close(self):
        await self._server.close()

    async def score(self, items):
        self.asked.set()
        await self.open.wait()
        if self.name == "broken":
            raise RuntimeError("a bug")
        return [{"score": float(item["response"] == "yes"), "failure": None} for item in items]


@asynccontextmanager
async def scorer_of(front, **options):
    address = await front.start()
    client = RpcClient(address)
    try:
        yield RpcScorer(client, look_seconds=0.1, **options), address
    finally:
        await client.close()
        await front.close()


async def test_samples_are_scored():
    async with scorer_of(Front("a")) as (scorer, _):
        assert [answer["score"] for answer in await scorer.score(ITEMS, 20.0)] == [1.0, 0.0]


async def test_samples_of_a_front_that_is_lost_go_to_the_one_in_its_place():
    first = Front("a", is_open=False)
    async with scorer_of(first) as (scorer, address):
        scoring = asyncio.create_task(scorer.score(ITEMS, 20.0))
        await asyncio.wait_for(first.asked.wait(), 20)
        await first.close()
        await asyncio.sleep(0.3)  # nobody is there for a while
        assert not scoring.done()
        second = Front("b")
        await second.start(address)
        assert [answer["score"] for answer in await asyncio.wait_for(scoring, 20)] == [1.0, 0.0]
        await second.close()


async def test_a_front_that_does_not_come_back_is_an_error_by_a_deadline():
    first = Front("a", is_open=False)
    async with scorer_of(first, away_seconds=0.5) as (scorer, _):
        scoring = asyncio.create_task(scorer.score(ITEMS, 20.0))
        await asyncio.wait_for(first.asked.wait(), 20)
        await first.close()
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(scoring, 20)


async def test_what_a_front_answers_is_the_answer_also_an_error_or_silence():
    async with scorer_of(Front("broken")) as (scorer, _):
        with pytest.raises(RemoteError, match="a bug"):
            await scorer.score(ITEMS, 20.0)
    async with scorer_of(Front("slow", is_open=False)) as (scorer, _):
        with pytest.raises(DeadlineExceeded):
            await scorer.score(ITEMS, 0.3)
