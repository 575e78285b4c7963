"""The rollouter, in virtual time: admission, generation, failures, the end."""

import asyncio

import pytest

from asyncrl.errors import MessageTooLarge, UserError
from asyncrl.messages import GroupId
from asyncrl.protocols import End
from asyncrl.simulation.loop import run_virtual
from tests.services.rollouter_parts import Bench, make_config, tokens_of

HOUR = 3600.0


def in_virtual_time(test):
    """A coroutine test on a virtual loop."""

    def run():
        run_virtual(test(), limit_seconds=24 * HOUR)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_virtual_time
async def test_nothing_starts_before_the_servers_have_confirmed_a_version():
    async with Bench(make_config()) as bench:
        await bench.settle()
        assert not bench.dispatched
        bench.fleet.show(0)
        await bench.settle()
        assert bench.dispatched


@in_virtual_time
async def test_generation_runs_ahead_by_exactly_the_staleness_bound():
    async with Bench(make_config()) as bench:
        bench.fleet.show(0)
        await bench.settle()
        assert len(bench.dispatched) == 12  # (v + 1 + η)·G of the worked example
        await bench.take_step()
        await bench.settle()
        assert len(bench.dispatched) == 12
        assert bench.ledger.attempts.dispatched == 16


@in_virtual_time
async def test_an_adapted_bound_is_the_one_that_the_trainer_said_with_its_last_step():
    """η from 1 to 2 lets 4 groups more live; back to 1, what is live stays, and nothing starts until a step has made room."""
    async with Bench(make_config(rollout={"max_staleness": "auto", "staleness_ceiling": 4})) as bench:
        bench.fleet.show(0)
        live = []
        for said in (None, 2, 2, 1, 1):
            await bench.settle()
            live.append(len(bench.dispatched))
            await bench.take_step(bound=said)
        assert live == [8, 8, 12, 12, 8]
        assert bench.rollouter.status()["staleness_bound"] == 1


@in_virtual_time
async def test_a_version_that_the_servers_do_not_confirm_holds_generation_back():
    async with Bench(make_config()) as bench:
        bench.fleet.show(0)
        await bench.settle()
        for _ in range(3):
            await bench.take_step()
            bench.fleet.show(0)  # the servers are stuck
            await bench.settle()
        assert bench.ledger.attempts.dispatched == 12
        assert not bench.dispatched


@in_virtual_time
async def test_while_no_server_takes_traffic_nothing_starts():
    async with Bench(make_config()) as bench:
        bench.fleet.show(0)
        await bench.settle()
        await bench.take_step()
        bench.fleet.show(1, "STALE")
        dispatched = bench.ledger.attempts.dispatched
        await bench.settle()
        assert bench.ledger.attempts.dispatched == dispatched
        assert bench.rollouter.status()["waiting_for"] == "no server"


@in_virtual_time
async def test_a_group_is_in_the_ledger_before_it_is_generated():
    bench = Bench(make_config())
    asked = []

    async def generate(request):
        id = GroupId.parse(request.members[0].rid.rpartition("/")[0])
        asked.append(bench.ledger.attempts.state(id))
        async for completions in type(bench.engine).generate(bench.engine, request):
            yield completions

    bench.engine.generate = generate
    async with bench:
        bench.fleet.show(0)
        await bench.settle()
        assert asked == ["in_flight"] * 12


@in_virtual_time
async def test_every_member_is_sent_once_as_it_finishes():
    async with Bench(make_config(rollout={"group_size": 3})) as bench:
        bench.fleet.show(0)
        await bench.train_to_the_end()
        ids = [trajectory.id for trajectory in bench.sender.sent]
        assert len(set(ids)) == len(ids) == 3 * 4 * 10
        assert len({trajectory.generate_seconds for trajectory in bench.sender.sent}) > 3


@in_virtual_time
async def test_what_is_finished_while_a_send_waits_goes_out_in_one_send():
    async with Bench(make_config()) as bench:
        bench.sender.room.clear()
        bench.fleet.show(0)
        await bench.settle()
        assert len(bench.rollouter.in_flight()) == 12
        bench.sender.room.set()
        await bench.settle()
        assert len(bench.sender.batches) == 2
        assert not bench.rollouter.in_flight()


@in_virtual_time
async def test_in_flight_is_what_the_queue_has_not_accepted():
    async with Bench(make_config(), engine={"token_seconds": 10.0}) as bench:
        bench.fleet.show(0)
        await asyncio.sleep(1)
        assert bench.rollouter.in_flight() == [str(id) for id in bench.dispatched]
        await bench.settle(HOUR)
        assert not bench.rollouter.in_flight()


@in_virtual_time
async def test_a_failed_generation_is_tried_again_and_then_sent_as_failed():
    tries = []

    def failure(member):
        tries.append(member.rid)
        return "server lost" if member.rid.startswith("0/3/0/1") or member.rid == "0/5/0/0" else None

    async with Bench(make_config(rollout={"generation_retries": 2}), engine={"failure": failure}) as bench:
        bench.fleet.show(0)
        await bench.settle()
        failed = [trajectory for trajectory in bench.sender.sent if trajectory.failure]
        assert [str(trajectory.id) for trajectory in failed] == ["0/3/0/1"]
        assert failed[0].failure == "generation failed 3 times: server lost"
        assert [rid for rid in tries if rid.startswith("0/3/0/1")] == ["0/3/0/1", "0/3/0/1:1", "0/3/0/1:2"]
        assert [rid for rid in tries if rid.startswith("0/5/0/0")] == ["0/5/0/0", "0/5/0/0:1"]
        assert bench.rollouter.summary()["trajectories"] == {"generated": 23}
        assert bench.rollouter.summary()["rollout"]["failed"] == 1


@in_virtual_time
async def test_a_retried_member_has_the_tokens_that_it_would_have_had():
    def first_try_of_all(member):
        return None if ":" in member.rid else "lost"

    async def sent(**engine):
        async with Bench(make_config(), engine=engine) as bench:
            bench.fleet.show(0)
            await bench.settle()
            return {trajectory.id: tokens_of(trajectory) for trajectory in bench.sender.sent}

    assert await sent(failure=first_try_of_all) == await sent()


@in_virtual_time
async def test_members_of_a_group_differ():
    async with Bench(make_config(rollout={"group_size": 8}), engine={"num_tokens": lambda *_: 8}) as bench:
        bench.fleet.show(0)
        await bench.settle()
        for members in bench.sender.by_group().values():
            assert len({tuple(tokens_of(trajectory)) for trajectory in members}) == 8


@in_virtual_time
async def test_a_group_whose_every_member_failed_is_sent_all_the_same():
    async with Bench(make_config(), engine={"failure": lambda member: "down"}) as bench:
        bench.fleet.show(0)
        await bench.settle()
        assert len(bench.sender.sent) == 24
        assert all(trajectory.failure for trajectory in bench.sender.sent)


@pytest.mark.parametrize("advantage", ["grpo", "remax"])
@pytest.mark.parametrize(("group_size", "places"), [(2, 5), (4, 4), (6, 4), (7, 3), (1, 1)])
def test_no_more_trajectories_are_generated_at_once_than_there_are_places(group_size, places, advantage):
    async def main():
        config = make_config(rollout={"group_size": group_size, "max_concurrent": places}, algorithm={"advantage": advantage})
        members = config.members_per_group
        async with Bench(config) as bench:
            running, most = set(), [0]
            answer = bench.engine._answer

            async def counted(request, member, deadline):
                running.add(member.rid)
                most[0] = max(most[0], len(running))
                try:
                    return await answer(request, member, deadline)
                finally:
                    running.discard(member.rid)

            bench.engine._answer = counted
            bench.fleet.show(0)
            await bench.train_to_the_end()
            assert len(bench.sender.sent) == members * 40
            assert most[0] <= places
            assert most[0] >= min(members, places)
            assert bench.rollouter.status()["generating"] == 0

    run_virtual(main(), limit_seconds=HOUR)


@in_virtual_time
async def test_a_reissue_goes_first_with_the_next_attempt_and_the_same_prompt():
    async with Bench(make_config(rollout={"on_stale": "reissue"})) as bench:
        bench.fleet.show(0)
        await bench.settle()
        await bench.ledger.end([End(GroupId(0, 2, 0), "expired", "too old", reissue=True)])
        await bench.settle()
        assert bench.dispatched[-1] == GroupId(0, 2, 1)
        members = bench.sender.by_group()
        assert members[GroupId(0, 2, 1)][0].prompt == members[GroupId(0, 2, 0)][0].prompt
        assert tokens_of(members[GroupId(0, 2, 1)][0]) != tokens_of(members[GroupId(0, 2, 0)][0])


@in_virtual_time
async def test_a_group_that_failed_leaves_room_for_another():
    async with Bench(make_config()) as bench:
        bench.fleet.show(0)
        await bench.settle()
        await bench.ledger.end([End(GroupId(0, 2, 0), "failed", "too few scored")])
        await bench.settle()
        assert bench.dispatched[-1] == GroupId(0, 12, 0)


@in_virtual_time
async def test_a_group_that_ends_while_it_is_generated_gives_its_places_back():
    config = make_config(rollout={"max_concurrent": 2})
    async with Bench(config, engine={"token_seconds": 1000.0}) as bench:
        bench.fleet.show(0)
        await bench.settle()
        assert bench.dispatched == [GroupId(0, 0, 0)]
        await bench.ledger.end([End(GroupId(0, 0, 0), "failed", "no reason")])
        await bench.settle()
        assert bench.dispatched == [GroupId(0, 1, 0)]
        assert bench.rollouter.status()["generating"] == 2


@in_virtual_time
async def test_a_row_may_ask_for_a_length_of_its_own():
    rows = [{"prompt": "short", "sampling": {"max_new_tokens": 2}}, {"prompt": "as the run"}]
    async with Bench(
        make_config(), prompts=rows, engine={"num_tokens": lambda request, _: request.sampling.max_new_tokens}
    ) as bench:
        bench.fleet.show(0)
        await bench.settle()
        assert {(t.prompt, len(t.response_tokens)) for t in bench.sender.sent} == {("short", 2), ("as the run", 8)}


@in_virtual_time
async def test_no_more_groups_start_than_the_steps_take():
    async with Bench(make_config(rollout={"max_staleness": 4})) as bench:
        bench.fleet.show(0)
        await bench.train_to_the_end()
        assert bench.ledger.attempts.dispatched == 40
        assert not bench.dispatched
        assert bench.sender.closed
        assert bench.rollouter.status()["state"] == "done"


@in_virtual_time
async def test_the_end_of_data_closes_the_stream_before_training_ends():
    async with Bench(make_config(), prompts=[f"prompt {row}" for row in range(6)], epochs=1) as bench:
        bench.fleet.show(0)
        await bench.settle()
        assert bench.sender.closed
        assert len(bench.sender.sent) == 12
        assert not bench.running.done()
        await bench.train_to_the_end()
        assert bench.ledger.attempts.dispatched == 6


@in_virtual_time
async def test_where_groups_may_be_issued_again_the_stream_stays_open_for_whole_batches():
    config = make_config(rollout={"on_stale": "reissue"})
    async with Bench(config, prompts=[f"prompt {row}" for row in range(6)], epochs=1) as bench:
        bench.fleet.show(0)
        await bench.settle()
        assert not bench.sender.closed
        await bench.take_step([GroupId(0, row, 0) for row in range(4)], state="expired", reissue=True)
        await bench.settle()
        assert GroupId(0, 3, 1) in bench.dispatched
        await bench.take_step()
        await bench.settle()
        assert bench.sender.closed


@in_virtual_time
async def test_what_is_left_when_training_ends_has_an_end_in_the_ledger():
    async with Bench(make_config(), engine={"token_seconds": 1000.0}) as bench:
        bench.fleet.show(0)
        await bench.settle()
        await bench.ledger.finish_training(0)
        await bench.running
        assert bench.ledger.attempts.counts() | {"failed": 12, "in_flight": 0} == bench.ledger.attempts.counts()
        assert bench.ledger.attempts.reasons == {"failed: training is over": 12}


@in_virtual_time
async def test_a_stop_ends_the_run_and_leaves_what_is_in_flight_as_it_is():
    async with Bench(make_config(), eval_rows=["held out"], engine={"token_seconds": 1.0}) as bench:
        bench.fleet.show(0)
        await bench.settle(20)
        await bench.rollouter.stop()
        await bench.running
        assert not bench.sender.closed, "a later start goes on with the stream"
        assert bench.ledger.attempts.counts()["in_flight"] == 12


@in_virtual_time
async def test_a_stop_before_the_servers_are_there_ends_the_run():
    async with Bench(make_config()) as bench:
        await bench.rollouter.stop()
        await bench.running


@in_virtual_time
async def test_a_prompt_that_is_too_long_is_refused_by_name_before_anything_starts():
    async with Bench(make_config(), prompts=["short", "x" * 33]) as bench:
        with pytest.raises(UserError, match=r"data.train: the prompt of row 1 has 33 tokens"):
            await bench.running


@in_virtual_time
async def test_a_trajectory_too_large_for_the_queue_is_a_failed_one():
    bench = Bench(make_config())
    send = bench.sender.send

    async def picky(messages):
        if any(message.id.row == 1 and not message.failure for message in messages):
            raise MessageTooLarge("9 MB, and queue.capacity_megabytes is 1")
        await send(messages)

    bench.sender.send = picky
    async with bench:
        bench.fleet.show(0)
        await bench.settle()
        failed = {str(trajectory.id): trajectory.failure for trajectory in bench.sender.sent if trajectory.failure}
        assert failed == dict.fromkeys(("0/1/0/0", "0/1/0/1"), "9 MB, and queue.capacity_megabytes is 1")
        assert not bench.rollouter.in_flight()


@in_virtual_time
async def test_idle_time_has_a_name():
    async with Bench(make_config(rollout={"max_staleness": 0})) as bench:
        bench.fleet.show(0)
        await bench.train_to_the_end()
        summary = bench.rollouter.summary()
        assert 0.9 < summary["idle"]["rollouter"] <= 1
        assert max(summary["rollout"]["idle_seconds"], key=summary["rollout"]["idle_seconds"].get) == "staleness bound"


@in_virtual_time
async def test_metrics_tell_what_is_going_on():
    async with Bench(make_config(), engine={"token_seconds": 0.4}) as bench:
        bench.fleet.show(0)
        await bench.settle(2.5)
        metrics = bench.tracker.last("rollouter")
        assert metrics["rollouter/tokens_per_second"] > 0
        assert metrics["rollouter/live_groups"] == 12
        assert "rollouter/finish/stop" in metrics
