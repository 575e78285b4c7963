"""The greedy response to each prompt: asked for beside the samples, at temperature 0, and handed over as one more member."""

from __future__ import annotations

import asyncio

from asyncrl.messages import GroupId
from asyncrl.protocols import End
from tests.services.rollouter_parts import Bench, make_config, tokens_of
from tests.services.test_rollouter_resume import in_virtual_time

REMAX = {"algorithm": {"advantage": "remax"}}
GROUP = GroupId(0, 0, 0)


def remax(**rollout):
    return make_config(rollout=rollout, **REMAX)


class Asked:
    """What the engine was asked for: temperature and members of each request, by group."""

    def __init__(self, bench):
        self.requests = []
        generate = bench.engine.generate

        async def asked(request):
            self.requests.append((request.sampling, tuple(member.rid for member in request.members)))
            async for completions in generate(request):
                yield completions

        bench.engine.generate = asked

    def of(self, group):
        return [(sampling.temperature, rids) for sampling, rids in self.requests if rids[0].startswith(f"{group}/")]


@in_virtual_time
async def test_the_last_member_of_a_group_is_greedy_and_the_others_are_sampled():
    async with Bench(remax(group_size=3)) as bench:
        asked = Asked(bench)
        bench.fleet.show(0)
        await bench.settle()
        assert asked.of(GROUP) == [(1.0, ("0/0/0/0", "0/0/0/1", "0/0/0/2")), (0.0, ("0/0/0/3",))]
        members = bench.sender.by_group()[GROUP]
        assert sorted(each.id.member for each in members if not each.is_greedy) == [0, 1, 2]
        assert [each.id.member for each in members if each.is_greedy] == [3]
        assert {each.group_size for each in members} == {3}


@in_virtual_time
async def test_samples_are_those_that_a_run_without_greedy_responses_draws():
    async def samples(config):
        async with Bench(config) as bench:
            bench.fleet.show(0)
            await bench.settle()
            return {each.id: tokens_of(each) for each in bench.sender.sent if not each.is_greedy}

    assert await samples(remax()) == await samples(make_config())


@in_virtual_time
async def test_a_row_s_own_length_is_the_greedy_response_s_too():
    rows = [{"prompt": "short", "sampling": {"max_new_tokens": 2}}]
    longest = {"num_tokens": lambda request, _: request.sampling.max_new_tokens}
    async with Bench(remax(), prompts=rows, engine=longest) as bench:
        asked = Asked(bench)
        bench.fleet.show(0)
        await bench.settle()
        assert {sampling.temperature for sampling, _ in asked.requests} == {0.0, 1.0}
        assert {len(each.response_tokens) for each in bench.sender.sent} == {2}


@in_virtual_time
async def test_an_agent_of_several_turns_is_greedy_in_each():
    async def agent(prompt, session):
        await session.generate(prompt.prompt, max_new_tokens=2)
        await session.generate([*session.tokens, 7], max_new_tokens=2)

    async with Bench(remax(group_size=1), agent=agent) as bench:
        asked = Asked(bench)
        bench.fleet.show(0)
        await bench.settle()
        turns = sorted(asked.of(GROUP))
        assert turns == [
            (0.0, ("0/0/0/1:0.0",)),
            (0.0, ("0/0/0/1:1.0",)),
            (1.0, ("0/0/0/0:0.0",)),
            (1.0, ("0/0/0/0:1.0",)),
        ]


@in_virtual_time
async def test_a_greedy_response_that_fails_is_sent_as_failed():
    down = {"failure": lambda member: "down" if member.rid.startswith("0/0/0/2") else None}
    async with Bench(remax(), engine=down) as bench:
        bench.fleet.show(0)
        await bench.settle()
        (failed,) = [each for each in bench.sender.sent if each.failure]
        assert failed.is_greedy
        assert len(bench.sender.by_group()[GROUP]) == 3


@in_virtual_time
async def test_a_group_that_ends_in_the_middle_gives_all_its_places_back():
    async with Bench(remax(max_concurrent=3), engine={"token_seconds": 1000.0}) as bench:
        bench.fleet.show(0)
        await bench.settle()
        assert bench.rollouter.status()["generating"] == 3
        await bench.ledger.end([End(GROUP, "failed", "no reason")])
        await bench.settle()
        assert bench.dispatched == [GroupId(0, 1, 0)]
        assert bench.rollouter.status()["generating"] == 3


@in_virtual_time
async def test_after_a_restart_the_greedy_response_alone_may_be_missing():
    slow = {"num_tokens": lambda request, member: 8, "token_seconds": 1.0}
    async with Bench(remax(), engine=slow) as bench:
        answer = bench.engine._answer

        async def late(request, member, deadline):
            if not request.sampling.temperature:
                await asyncio.sleep(100)
            return await answer(request, member, deadline)

        bench.engine._answer = late
        bench.fleet.show(0)
        await bench.settle(50)
        assert {each.id.member for each in bench.sender.by_group()[GROUP]} == {0, 1}
        await bench.lose()
        bench.engine._answer = answer
        asked = Asked(bench)
        await bench.restart()
        await bench.settle()
        assert asked.of(GROUP) == [(0.0, ("0/0/0/2",))]
        assert {each.id.member for each in bench.sender.by_group()[GROUP]} == {0, 1, 2}


@in_virtual_time
async def test_greedy_responses_are_counted_apart():
    async with Bench(remax()) as bench:
        bench.fleet.show(0)
        await bench.settle()
        summary = bench.rollouter.summary()
        assert summary["trajectories"]["generated"] == len(bench.sender.sent) == 36
        assert summary["rollout"]["greedy"] == 12
