"""Evaluation: first before anything starts, last when everybody has the last version, in between out of the rollouts' way."""

import asyncio

import pytest

from asyncrl.errors import DeadlineExceeded
from asyncrl.protocols.weights import ServerView
from asyncrl.services.rollouter.evaluation import samples_in_turn
from asyncrl.services.rollouter.generation import Places
from asyncrl.simulation.loop import run_virtual
from tests.services.rollouter_parts import Bench, make_config, tokens_of

HOUR = 3600.0
HELD_OUT = [{"prompt": f"held out {row}", "ground_truth": str(row), "level": row} for row in range(4)]


def bench_of(*, rollout=None, training=None, evaluation=None, engine=None, **options):
    config = make_config(rollout=rollout, training=training, evaluation=evaluation)
    return Bench(config, eval_rows=HELD_OUT, engine=engine, **options)


def in_virtual_time(test):
    def run():
        run_virtual(test(), limit_seconds=24 * HOUR)

    run.__name__ = test.__name__
    return run


@pytest.mark.parametrize(("prompts", "samples", "expected"), [(4, 6, [2, 2, 1, 1]), (4, 3, [1, 1, 1, 0]), (1, 5, [5])])
def test_prompts_are_taken_in_turn(prompts, samples, expected):
    assert samples_in_turn(prompts, samples) == expected


@in_virtual_time
async def test_the_first_evaluation_ends_before_anything_is_dispatched():
    async with bench_of(engine={"token_seconds": 1.0}) as bench:
        bench.fleet.show(0)
        while len(bench.scorer.items) < 6:
            assert not bench.ledger.attempts.dispatched
            await asyncio.sleep(0.5)
        await bench.settle()
        assert bench.ledger.attempts.dispatched
        assert bench.rollouter.summary()["eval"]["first"] == 1.0


@in_virtual_time
async def test_samples_carry_what_a_reward_needs():
    async with bench_of() as bench:
        bench.fleet.show(0)
        await bench.settle()
        assert [item["prompt"] for item in bench.scorer.items].count("held out 0") == 2
        assert len(bench.scorer.items) == 6
        item = next(item for item in bench.scorer.items if item["prompt"] == "held out 3")
        assert (item["ground_truth"], item["extra_info"]) == ("3", {"level": 3})
        assert item["response"]


@in_virtual_time
async def test_the_last_evaluation_waits_until_the_servers_have_the_last_version():
    async with bench_of(training={"steps": 2}) as bench:
        bench.fleet.show(0)
        await bench.settle()
        await bench.take_step()
        await bench.settle()
        await bench.take_step()
        bench.fleet.show(1)  # version 2 is not there yet
        await bench.ledger.finish_training(2)
        await bench.settle()
        assert len(bench.scorer.items) == 6
        bench.fleet.show(2)
        await bench.running
        last = bench.rollouter.summary()["eval"]["history"][-1]
        assert (last["step"], last["version_min"], last["version_max"]) == (2, 2, 2)
        assert bench.rollouter.summary()["eval"]["last"] == 1.0


async def two_steps_with_a_stale_server(bench):
    """Training is over at version 2, which one server has and the other has not; the moment."""
    stale = ServerView("inference/1", "", "STALE", 1)
    bench.fleet.show(0)
    await bench.settle()
    for _ in range(2):
        await bench.take_step()
        await bench.settle()
    bench.fleet.show(2, others=(stale,))
    await bench.ledger.finish_training(2)
    over = bench.clock.now()
    await bench.settle()
    assert [record["occasion"] for record in bench.rollouter.summary()["eval"]["history"]] == ["first"]
    return over


@in_virtual_time
async def test_the_last_evaluation_waits_for_a_stale_server_too():
    async with bench_of(training={"steps": 2}) as bench:
        await two_steps_with_a_stale_server(bench)
        bench.fleet.show(2, others=(ServerView("inference/1", "", "READY", 2),))
        began = bench.clock.now()
        await bench.running
        assert bench.rollouter.summary()["eval"]["last"] == 1.0
        assert bench.clock.now() - began < 30


@in_virtual_time
async def test_a_server_that_stays_stale_is_left_out_of_the_last_evaluation_by_a_deadline():
    async with bench_of(training={"steps": 2}) as bench:
        over = await two_steps_with_a_stale_server(bench)
        await bench.running
        assert bench.rollouter.summary()["eval"]["last"] == 1.0
        assert 120 <= bench.clock.now() - over < 130  # twice sync.timeout_seconds


@in_virtual_time
async def test_without_the_last_version_there_is_no_last_evaluation():
    async with bench_of(training={"steps": 1}) as bench:
        bench.fleet.show(0)
        await bench.settle()
        await bench.take_step()
        bench.fleet.show(0)
        await bench.ledger.finish_training(1)
        await bench.running
        assert bench.rollouter.summary()["eval"]["last"] is None
        assert bench.rollouter.summary()["eval"]["first"] == 1.0


@in_virtual_time
async def test_evaluations_come_every_so_many_steps():
    async with bench_of(training={"steps": 10}, evaluation={"every": 3}) as bench:
        bench.fleet.show(0)
        await bench.train_to_the_end()
        assert [record["step"] for record in bench.rollouter.summary()["eval"]["history"]] == [0, 3, 6, 9, 10]
        assert [step for axis, step, _ in bench.tracker.rows if axis == "eval"] == [0, 3, 6, 9, 10]


@in_virtual_time
async def test_every_evaluation_throws_the_same_dice_and_every_sample_its_own():
    seeds = []
    bench = bench_of(training={"steps": 2}, evaluation={"every": 0}, engine={"num_tokens": lambda *_: 8})
    generate = bench.engine.generate

    async def watched(request):
        if request.members[0].rid.startswith("eval"):
            seeds.extend(member.seed for member in request.members)
        async for completions in generate(request):
            yield completions

    bench.engine.generate = watched
    async with bench:
        bench.fleet.show(0)
        await bench.train_to_the_end()
    assert seeds[:6] == seeds[6:]
    assert len(set(seeds)) == 6


@in_virtual_time
async def test_evaluation_samples_at_its_own_temperature():
    bench = bench_of(evaluation={"temperature": 0.0})
    temperatures = set()
    generate = bench.engine.generate

    async def watched(request):
        temperatures.add((request.members[0].rid.startswith("eval"), request.sampling.temperature))
        async for completions in generate(request):
            yield completions

    bench.engine.generate = watched
    async with bench:
        bench.fleet.show(0)
        await bench.settle()
    assert temperatures == {(True, 0.0), (False, 1.0)}


@in_virtual_time
async def test_failures_are_counted_and_leave_the_rest():
    async with bench_of() as bench:
        bench.scorer.answer = lambda item: (
            {"score": None, "failure": "timeout"} if item["prompt"] == "held out 0" else {"score": 0.5, "failure": None}
        )
        bench.fleet.show(0)
        await bench.settle()
        record = bench.rollouter.summary()["eval"]["history"][0]
        assert (record["score"], record["samples"], record["failed"]) == (0.5, 4, 2)


@in_virtual_time
async def test_an_evaluation_without_a_score_is_null_and_does_not_end_the_run():
    async with bench_of() as bench:

        async def silent(items, timeout):
            raise DeadlineExceeded("the reward service is silent")

        bench.scorer.score = silent
        bench.fleet.show(0)
        await bench.train_to_the_end()
        summary = bench.rollouter.summary()["eval"]
        assert summary["first"] is None
        assert summary["last"] is None
        assert summary["history"][0]["failed"] == 6


@in_virtual_time
async def test_an_evaluation_that_takes_too_long_scores_what_is_there():
    def num_tokens(request, member):
        return 8 if member.index else 1

    slow = {"token_seconds": 100.0, "num_tokens": num_tokens}
    async with bench_of(rollout={"request_timeout_seconds": 300.0, "generation_retries": 5}, engine=slow) as bench:
        bench.fleet.show(0)
        await bench.settle(1000)
        record = bench.rollouter.summary()["eval"]["history"][0]
        assert (record["samples"], record["failed"]) == (4, 2)


@in_virtual_time
async def test_evaluation_leaves_the_places_to_rollouts():
    config = {"rollout": {"max_concurrent": 4}, "training": {"steps": 20}, "evaluation": {"every": 1, "samples": 40}}
    async with bench_of(engine={"token_seconds": 0.3}, **config) as bench:
        missing_places = []

        class Watched(Places):
            """The places as evaluation sees them."""

            def __init__(self):
                self.total = 4

            def take(self, places):
                shared.take(places)
                missing_places.append(bench.rollouter._admission.startable * 2 - shared.free)

            def give(self, places):
                shared.give(places)

        shared = bench.rollouter._places
        bench.rollouter._evaluator._places = Watched()
        bench.fleet.show(0)
        await bench.train_to_the_end()
        assert len(missing_places) > 40
        assert max(missing_places) <= 0


@in_virtual_time
async def test_an_evaluation_under_way_when_training_ends_is_finished_first():
    async with bench_of(training={"steps": 4}, evaluation={"every": 2}, engine={"token_seconds": 30.0}) as bench:
        bench.fleet.show(0)
        await bench.settle(HOUR)
        for _ in range(4):
            await bench.take_step()
            await asyncio.sleep(1.0)
        await bench.ledger.finish_training(4)
        await bench.running
        history = bench.rollouter.summary()["eval"]["history"]
        assert [record["step"] for record in history] == [0, 2, 4]
        assert [record["samples"] for record in history] == [6, 6, 6]


@in_virtual_time
async def test_evaluation_uses_the_agent_of_the_run():
    async def agent(prompt, session):
        await session.generate(prompt.prompt, max_new_tokens=2)
        await session.generate([*session.tokens, 1], max_new_tokens=2)

    async with bench_of(agent=agent, engine={"num_tokens": lambda *_: 2}) as bench:
        bench.fleet.show(0)
        await bench.settle()
        assert len(bench.scorer.items) == 6
        assert {tuple(trajectory.loss_mask) for trajectory in bench.sender.sent} == {(True, True, False, True, True)}
        assert all(len(tokens_of(trajectory)) == 5 for trajectory in bench.sender.sent)
