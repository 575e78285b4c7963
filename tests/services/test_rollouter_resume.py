"""A rollouter that takes a lost one's place: it goes on where the ledger says, and nothing is generated twice or forgotten."""

import asyncio
import json
from dataclasses import replace

import pytest

from asyncrl.data import StreamSource
from asyncrl.errors import RunError, StreamClosed
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.messages import GroupId
from asyncrl.protocols import End
from asyncrl.simulation.loop import run_virtual
from tests.services.rollouter_parts import Bench, make_config, tokens_of

HOUR = 3600.0
SLOW = {"token_seconds": 10.0, "num_tokens": lambda request, member: 1 + 7 * member.index}


def in_virtual_time(test):
    def run(**given):
        run_virtual(test(**given), limit_seconds=24 * HOUR)

    run.__name__ = test.__name__
    return run


def evaluations(tmp_path):
    return [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]


@in_virtual_time
async def test_only_what_is_missing_is_generated_again_first_in_line_and_with_the_same_dice():
    async with Bench(make_config(), engine=SLOW) as whole:
        whole.fleet.show(0)
        await whole.settle(HOUR)
        expected = {trajectory.id: tokens_of(trajectory) for trajectory in whole.sender.sent}
    async with Bench(make_config(), engine=SLOW) as bench:
        bench.fleet.show(0)
        await asyncio.sleep(20)  # member 0 of every group is there, member 1 is not
        assert len(bench.sender.sent) == 12
        await bench.lose()
        await bench.restart()
        assert len((await bench.ledger.resume_rollouter()).returned) == 12
        assert len(bench.rollouter.in_flight()) == 12
        await bench.settle(HOUR)
        assert {trajectory.id: tokens_of(trajectory) for trajectory in bench.sender.sent} == expected
        assert len(bench.sender.sent) == 24
        assert bench.ledger.attempts.counts()["dispatched"] == 12
        assert not bench.rollouter.in_flight()


@in_virtual_time
async def test_a_restart_takes_the_adapted_bound_from_the_ledger():
    async with Bench(make_config(rollout={"max_staleness": "auto"})) as bench:
        bench.fleet.show(0)
        await bench.settle()
        await bench.take_step(bound=3)
        await bench.settle()
        await bench.lose()
        await bench.restart()
        await bench.settle()
        assert bench.rollouter.status()["staleness_bound"] == 3
        assert len(bench.dispatched) == 16


@in_virtual_time
async def test_a_restart_counts_what_is_live_and_passes_admission_again_for_what_is_lost():
    async with Bench(make_config(), engine=SLOW) as bench:
        bench.fleet.show(0)
        await bench.settle(HOUR)
        await bench.take_step()
        await asyncio.sleep(20)  # 8 whole groups, 4 half ones
        await bench.lose()
        bench.fleet.show(1, "STALE")
        await bench.restart()
        assert bench.rollouter.status()["live_groups"] == 8
        await bench.settle(HOUR)
        assert bench.ledger.attempts.returned(), "nobody takes traffic: nothing starts"
        bench.fleet.show(1)
        await bench.settle(HOUR)
        assert not bench.ledger.attempts.returned()
        again = [group for group in bench.ledger.attempts.live() if group.id.row in range(12, 16)]
        assert [group.start_version for group in again] == [1] * 4
        assert bench.rollouter.status()["live_groups"] == 12


@in_virtual_time
async def test_a_run_whose_rollouter_is_lost_again_and_again_generates_every_member_once():
    config = make_config(rollout={"on_stale": "reissue", "group_size": 3, "max_concurrent": 5}, training={"steps": 60})
    async with Bench(config, prompts=[f"prompt {row}" for row in range(30)], epochs=1, engine={"token_seconds": 0.5}) as bench:
        bench.fleet.show(0)
        for number in range(200):
            await asyncio.sleep(7.3)
            if bench.sender.closed:
                break
            await bench.lose()
            await bench.restart()
            if len(bench.whole_groups()) >= 4:
                await bench.take_step(state="expired" if number % 5 == 4 else "trained", reissue=number % 5 == 4)
        assert bench.sender.closed
        sent = [trajectory.id for trajectory in bench.sender.sent]
        assert len(set(sent)) == len(sent)
        attempts = bench.ledger.attempts
        assert len(sent) == 3 * attempts.dispatched
        assert {(id.epoch, id.row) for id in bench.sender.by_group()} == {(0, row) for row in range(30)}


@in_virtual_time
async def test_reissues_that_were_owed_come_before_new_rows():
    async with Bench(make_config(rollout={"on_stale": "reissue"})) as bench:
        bench.fleet.show(0)
        await bench.settle()
        bench.fleet.show(0, "STALE")
        await bench.settle()
        await bench.ledger.end([End(GroupId(0, 2, 0), "expired", "too old", reissue=True), End(GroupId(0, 3, 0), "failed", "x")])
        await bench.lose()
        await bench.restart()
        bench.fleet.show(0)
        await bench.settle()
        assert bench.dispatched[-2:] == [GroupId(0, 2, 1), GroupId(0, 12, 0)]


@in_virtual_time
async def test_a_callable_source_finds_its_rows_again():
    rows = lambda: ({"prompt": f"row {number}"} for number in range(100))  # noqa: E731
    async with Bench(make_config(), engine=SLOW) as bench:
        bench.parts = replace(bench.parts, open_source=lambda cursor: StreamSource(rows, seed=0, cursor=cursor))
        await bench.lose()
        await bench.restart()
        bench.fleet.show(0)
        await asyncio.sleep(20)
        await bench.lose()
        await bench.restart()
        await bench.settle(HOUR)
        assert len(bench.sender.sent) == 24
        assert {trajectory.prompt for trajectory in bench.sender.sent} == {f"row {row}" for row in range(12)}


@in_virtual_time
async def test_a_stream_that_had_ended_stays_so():
    class Ended:
        async def send(self, messages):
            raise StreamClosed("topic rollouts has ended")

        async def close(self):
            raise StreamClosed("topic rollouts has ended")

    config = make_config(rollout={"on_stale": "reissue"})
    async with Bench(config, prompts=[f"prompt {row}" for row in range(6)], epochs=1) as bench:
        bench.fleet.show(0)
        await bench.settle()
        await bench.take_step()
        await bench.settle()
        assert bench.sender.closed
        await bench.ledger.end([End(GroupId(0, 4, 0), "expired", "too old", reissue=True)])
        await bench.lose()
        bench.parts = replace(bench.parts, sender=Ended())
        await bench.restart()
        await bench.settle()
        await bench.ledger.finish_training(1)
        await bench.running
        assert bench.ledger.attempts.counts()["in_flight"] == 0


@pytest.mark.parametrize("had_the_last", [False, True])
def test_where_training_is_over_only_the_last_evaluation_is_left(tmp_path, had_the_last):
    async def main():
        async with Bench(make_config(training={"steps": 1}), eval_rows=["held out"], run_dir=tmp_path) as bench:
            bench.fleet.show(0)
            await bench.settle()
            await bench.take_step()
            await bench.ledger.finish_training(1)
            if had_the_last:
                await bench.running
            await bench.lose()
            asked = len(bench.scorer.items)
            await bench.restart()
            await bench.running
            assert len(bench.scorer.items) - asked == (0 if had_the_last else 6)
            assert [line["occasion"] for line in evaluations(tmp_path)] == ["first", "last"]
            assert bench.rollouter.summary()["eval"]["last"] == 1.0

    run_virtual(main(), limit_seconds=HOUR)


def test_evaluations_survive_the_first_is_made_once_and_one_that_was_missed_is_made_up_for(tmp_path):
    rows = [{"prompt": "a", "data_source": "one"}, {"prompt": "b", "data_source": "two"}]

    async def main():
        config = make_config(evaluation={"every": 3, "samples": 4})
        async with Bench(config, eval_rows=rows, run_dir=tmp_path) as bench:
            bench.fleet.show(0)
            await bench.settle()
            for _ in range(2):
                await bench.take_step()
                await bench.settle()
            await bench.lose()
            for _ in range(2):
                await bench.take_step()  # step 3, when one is due, passes while nobody is there
            await bench.restart()
            await bench.settle()
            history = bench.rollouter.summary()["eval"]["history"]
            assert [(record["occasion"], record["step"]) for record in history] == [("first", 0), ("scheduled", 4)]
            assert bench.rollouter.summary()["eval"]["first"] == 1.0
            assert history == evaluations(tmp_path)
            assert history[0]["by_source"] == {name: {"score": 1.0, "samples": 2} for name in ("one", "two")}

    run_virtual(main(), limit_seconds=HOUR)


def test_after_a_set_back_evaluations_of_steps_that_are_to_come_again_go_and_so_does_a_torn_line(tmp_path):
    async def main():
        async with Bench(make_config(evaluation={"every": 2}), eval_rows=["held out"], run_dir=tmp_path) as bench:
            bench.fleet.show(0)
            await bench.settle()
            for _ in range(4):
                await bench.take_step()
                await bench.settle()
            await bench.lose()
            assert [line["step"] for line in evaluations(tmp_path)] == [0, 2, 4]
            with (tmp_path / "eval.jsonl").open("a") as file:
                file.write('{"step": 1, "sco')
            set_back = LocalLedgerClient()  # to step 2, as far as a rollouter can see it
            set_back.attempts.finished_steps = 2
            bench.parts = replace(bench.parts, ledger=set_back)
            await bench.restart()
            assert [line["step"] for line in evaluations(tmp_path)] == [0, 2]

    run_virtual(main(), limit_seconds=HOUR)


def failing_rows(*rows):
    return lambda member: "the server is confused" if int(member.rid.split("/")[1]) in rows else None


def quarantine_config(**rollout):
    return make_config(rollout={"generation_retries": 0, "quarantine_after": 2, **rollout}, training={"steps": 30})


async def play_front(bench, steps):
    """Groups with a failed member fail, others train."""
    for _ in range(steps):
        await bench.settle()
        sent = bench.sender.by_group()
        bad = [id for id in bench.whole_groups() if any(trajectory.failure for trajectory in sent[id])]
        if bad:
            await bench.ledger.end([End(id, "failed", f"too few scored: 0 of 2, {sent[id][0].failure}") for id in bad])
        elif len(bench.whole_groups()) >= 4:
            await bench.take_step()


def test_a_prompt_that_fails_again_and_again_is_not_generated_any_more_and_named_once(tmp_path, caplog):
    async def main():
        rows = [f"prompt {row}" for row in range(5)]
        async with Bench(quarantine_config(), prompts=rows, engine={"failure": failing_rows(3)}, run_dir=tmp_path) as bench:
            bench.fleet.show(0)
            await play_front(bench, 12)
            await bench.lose()
            await bench.restart()
            await play_front(bench, 12)
            assert {id.epoch for id in bench.sender.by_group() if id.row == 3} == {0, 1}
            reasons = bench.ledger.attempts.reasons
            assert reasons["failed: too few scored"] == 2
            assert reasons["failed: quarantined"] > 4
            (line,) = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
            assert (line["row"], line["prompt"], len(line["reasons"])) == (3, "prompt 3", 2)
            assert bench.rollouter._quarantine.reason(3).startswith("quarantined: row 3 failed")

    run_virtual(main(), limit_seconds=24 * HOUR)
    assert sum("row 3" in record.message and "not generated any more" in record.message for record in caplog.records) == 1


@in_virtual_time
async def test_zero_tries_again_for_ever():
    rows = [f"prompt {row}" for row in range(5)]
    config = quarantine_config(quarantine_after=0)
    async with Bench(config, prompts=rows, engine={"failure": failing_rows(3)}) as bench:
        bench.fleet.show(0)
        await play_front(bench, 24)
        assert len({id.epoch for id in bench.sender.by_group() if id.row == 3}) > 4


@in_virtual_time
async def test_a_run_of_nothing_but_quarantined_prompts_ends_and_says_so():
    config = quarantine_config()
    async with Bench(config, prompts=["a", "b"], engine={"failure": failing_rows(0, 1)}) as bench:
        bench.fleet.show(0)
        await play_front(bench, 12)
        with pytest.raises(RunError, match=r"every prompt of data.train is in quarantine, 2 of 2 failed 2 times in a row"):
            await bench.running
