"""The leader's checkpoints in virtual time: when they begin and are committed, what a failed one costs, and runs that go on."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from asyncrl.checkpoint import Checkpoints
from asyncrl.errors import CheckpointError, LedgerError
from asyncrl.protocols import StepOutcome
from asyncrl.services.trainer.figures import StepsOfAge, trained_tokens
from asyncrl.services.trainer.tally import Tally
from asyncrl.simulation.loop import VirtualClock
from tests.services.trainer_world import TrainerWorld, scored, virtual

EVERY_TWO = {"every": 2, "keep": 10}


def world_of(tmp_path, *, steps=6, save_seconds=0.2, checkpoint=EVERY_TWO, resume=None, times=None, **sections):
    training = {"steps": steps, "groups_per_step": 1, **sections.pop("training", {})}
    sections.setdefault("rollout", {"max_staleness": 9})
    world = TrainerWorld(tmp_path, training=training, checkpoint=checkpoint, resume=resume, times=times, **sections)
    world.engine.save_seconds = save_seconds
    return world


async def trained(world, rows):
    await world.arrive(*(scored(row) for row in rows))
    await world.run()
    return world


def steps_saved(run_dir):
    return [info.step for info in Checkpoints(run_dir).complete()]


def begun(world):
    return [int(folder.rsplit(".step_")[-1].split(".")[0]) for folder in world.engine.saves]


def test_every_so_many_steps_and_at_the_end_a_checkpoint_is_begun_and_committed_and_the_ledger_told(tmp_path):
    async def story():
        world = await trained(world_of(tmp_path, steps=5), range(5))
        assert begun(world) == [2, 4, 5]
        assert steps_saved(tmp_path) == world.ledger.checkpoints == [2, 4, 5]
        info = Checkpoints(tmp_path).newest_complete()
        assert (info.version, info.state["incarnation"], info.state["world_size"]) == (5, 3, 1)
        assert info.state["config"] == json.loads(json.dumps(world.config.to_mapping()))
        rows = world.lines("metrics")
        assert rows[3]["checkpoint/held_ms"] == pytest.approx(10)
        assert rows[3]["checkpoint/seconds"] == 0.2
        assert rows[3]["checkpoint/bytes"] > 0
        assert [row["checkpoint/failed"] for row in rows] == [0] * 5
        assert "checkpoint/seconds" in world.tracker.records[-1][2], "of the last one no later step can tell"

    virtual(story())


def test_what_a_checkpoint_is_gone_on_from_is_on_the_disk_before_it(tmp_path, monkeypatch):
    synced, order = os.fsync, []

    def fsync(handle):
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        synced(handle)

    async def story():
        world = world_of(tmp_path, steps=2)
        world.ledger.at_sync = lambda: order.append(f"ledger, {len(steps_saved(tmp_path))} complete")
        monkeypatch.setattr(os, "fsync", fsync)
        await trained(world, range(2))

    virtual(story())
    assert {"batches.jsonl", "metrics.jsonl", "samples.jsonl"} < set(order[: order.index("ledger, 0 complete")])
    assert "state.json" in order[order.index("ledger, 0 complete") :]


def test_a_ledger_or_a_file_that_cannot_be_synced_costs_the_checkpoint_and_not_the_run(tmp_path, caplog):
    def refuse():
        raise LedgerError("the ledger in X cannot be written: free space")

    async def story():
        world = world_of(tmp_path, steps=2)
        world.ledger.at_sync = refuse
        await trained(world, range(2))
        assert (steps_saved(tmp_path), world.service.summary()["steps"]) == ([], 2)
        assert (
            world.service.summary()["checkpoints"]["checkpoint_error"] == "step 2: the ledger in X cannot be written: free space"
        )

    virtual(story())


def test_without_checkpoints_nothing_is_saved_and_no_metric_speaks_of_it(tmp_path):
    async def story():
        world = await trained(world_of(tmp_path, checkpoint={"every": 0}), range(6))
        assert world.engine.saves == []
        assert not (tmp_path / "checkpoints").exists()
        assert not [name for row in world.lines("metrics") for name in row if name.startswith("checkpoint/")]

    virtual(story())


def test_training_goes_on_while_a_checkpoint_is_written_and_a_due_one_waits_its_turn(tmp_path):
    async def story():
        world = await trained(world_of(tmp_path, steps=10, save_seconds=4.5), range(10))
        assert begun(world) == [2, 7, 10], "steps take a second: at 4 and 6 the first was being written"
        assert steps_saved(tmp_path) == [2, 7, 10]
        times = [row["time/step_s"] for row in world.lines("metrics")[1:]]
        assert max(times) == pytest.approx(1.0, abs=0.05)

    virtual(story())


def test_a_checkpoint_is_committed_while_the_trainer_waits_for_groups(tmp_path):
    async def story():
        world = world_of(tmp_path, steps=3, save_seconds=3.0)
        await world.arrive(scored(0), scored(1))
        running = asyncio.create_task(world.run())
        await asyncio.sleep(10)
        assert world.ledger.checkpoints == [2]
        await world.arrive(scored(2))
        await running

    virtual(story())


def test_a_failed_checkpoint_is_said_counted_and_removed_and_the_run_goes_on(tmp_path, caplog):
    async def story():
        world = world_of(tmp_path, steps=6)
        world.engine.save_failure = lambda folder: "the disk is full: make room" if "000002" in folder else ""
        with caplog.at_level(logging.WARNING):
            await trained(world, range(6))
        assert steps_saved(tmp_path) == world.ledger.checkpoints == [4, 6]
        assert "step 2 failed, and the run goes on without it: the disk is full: make room" in caplog.text
        assert [row["checkpoint/failed"] for row in world.lines("metrics")] == [0, 0, 0, 1, 1, 1]
        assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]
        assert len(world.lines("batches")) == 6

    virtual(story())


def test_what_failed_is_told_with_its_reason_and_counts_on_in_a_later_start(tmp_path):
    async def story():
        world = world_of(tmp_path, steps=4)
        world.engine.save_failure = lambda folder: "the disk is full: make room" if "000002" in folder else ""
        await trained(world, range(4))
        told = {"checkpoint": 4, "checkpoints_failed": 1, "checkpoint_error": "step 2: the disk is full: make room"}
        assert world.service.summary()["checkpoints"] == told
        again = world_of(tmp_path, steps=4, resume=Checkpoints(tmp_path).newest_complete())
        again.ledger.attempts.finished_steps = 4
        await again.run()
        assert again.service.summary()["checkpoints"] == {**told, "checkpoint_error": None}

    virtual(story())


def test_a_checkpoint_says_how_long_the_run_took_so_far_over_all_its_launches(tmp_path):
    async def story():
        clock = VirtualClock()
        world = world_of(tmp_path, steps=4, times={"launched": clock.wall() - 30.0, "earlier_seconds": 500.0})
        await trained(world, range(4))
        first, last = Checkpoints(tmp_path).complete()
        assert 532.0 <= first.state["wall_s"] <= 533.0
        assert last.state["wall_s"] == pytest.approx(first.state["wall_s"] + 2.0, abs=0.5)

    virtual(story())


def test_a_folder_that_cannot_be_made_is_a_failed_checkpoint(tmp_path):
    async def story():
        tmp_path.joinpath("checkpoints").write_text("in the way")
        world = await trained(world_of(tmp_path, steps=2), range(2))
        assert world.service._leader.status()["checkpoints_failed"] == 1
        assert world.engine.saves == []
        assert world.service.summary()["steps"] == 2

    virtual(story())


def test_a_checkpoint_that_is_not_written_in_time_is_given_up(tmp_path, caplog):
    async def story():
        world = world_of(tmp_path, steps=8, save_seconds=1e6, checkpoint={"every": 2, "timeout_seconds": 3.0})
        with caplog.at_level(logging.WARNING):
            await trained(world, range(8))
        assert "checkpoint.timeout_seconds" in caplog.text
        assert steps_saved(tmp_path) == world.ledger.checkpoints == []
        assert begun(world) == [2, 5, 8], "one was due at 4, and waited until the first was given up"
        assert world.clock.now() < 20

    virtual(story())


@pytest.mark.parametrize(("save_seconds", "given", "saved"), [(2.0, 5.0, [3]), (8.0, 5.0, []), (8.0, None, [3])])
def test_a_stop_saves_within_the_time_that_it_gives(tmp_path, save_seconds, given, saved):
    async def story():
        world = world_of(tmp_path, steps=9, save_seconds=save_seconds, checkpoint={"every": 100})
        await world.arrive(*(scored(row) for row in range(3)))
        running = asyncio.create_task(world.run())
        await asyncio.sleep(5)
        await world.service.stop(given)
        began = world.clock.now()
        await running
        assert steps_saved(tmp_path) == saved
        assert world.clock.now() - began < (given or 10) + 0.6
        assert world.ledger.attempts.final_version is None

    virtual(story())


def test_the_newest_and_the_best_are_kept(tmp_path):
    async def story():
        world = world_of(tmp_path, steps=8, checkpoint={"every": 2, "keep": 1, "best": "reward/mean"})
        rewards = [(0.0, 0.2), (0.0, 0.3), (0.0, 0.5), (0.2, 1.0), (0.0, 0.9), (0.0, 0.4), (0.0, 0.1), (0.0, 0.2)]
        await world.arrive(*(scored(row, rewards=given) for row, given in enumerate(rewards)))
        await world.run()
        assert steps_saved(tmp_path) == [4, 8]
        assert Checkpoints(tmp_path, best="reward/mean").best() == 4

    virtual(story())


def test_the_best_by_evaluation_is_known_when_the_evaluation_is(tmp_path):
    async def story():
        sections = {"checkpoint": {"every": 2, "keep": 2, "best": "eval/score"}}
        world = world_of(tmp_path, steps=8, **sections)
        running = asyncio.create_task(trained(world, range(8)))
        for seconds, step, score in ((1.5, 0, 0.1), (3, 2, 0.9), (2, 4, 0.3), (2, 6, 0.2)):
            await asyncio.sleep(seconds)
            world.evaluations[step] = score
        await running
        assert steps_saved(tmp_path) == [2, 6, 8]

    virtual(story())


# ---- going on --------------------------------------------------------------------------------------------------


def test_a_resumed_trainer_goes_on_from_the_checkpoints_step_as_if_nothing_had_happened(tmp_path):
    async def undisturbed():
        sections = {"steps": 6, "schedule": "linear", "learning_rate": 1.0, "publish_every": 2}
        return await trained(world_of(tmp_path / "whole", training=sections), range(6))

    async def first_life():
        sections = {"steps": 6, "schedule": "linear", "learning_rate": 1.0, "publish_every": 2}
        world = world_of(tmp_path / "torn", training=sections, checkpoint={"every": 4})
        await world.arrive(*(scored(row) for row in range(5)))
        running = asyncio.create_task(world.run())
        await asyncio.sleep(30)
        assert world.ledger.checkpoints == [4]
        running.cancel()  # killed in its fifth step's wake: nothing of that is saved
        await asyncio.gather(running, return_exceptions=True)
        return world

    async def second_life(info):
        sections = {"steps": 6, "schedule": "linear", "learning_rate": 1.0, "publish_every": 2}
        world = world_of(tmp_path / "torn", training=sections, checkpoint={"every": 4}, resume=info)
        world.ledger.attempts.finished_steps = 4
        await trained(world, (4, 5))
        return world

    worlds = []

    async def story():
        whole = await undisturbed()
        before = await first_life()
        assert len(before.lines("batches")) == 5
        with (tmp_path / "torn" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "rew')
        info = Checkpoints(tmp_path / "torn").newest_complete()
        after = await second_life(info)
        worlds.extend((whole, before, after))

    virtual(story())
    whole, _, after = worlds
    assert after.engine.loaded.endswith("step_000004")
    assert after.engine.trained == whole.engine.trained == 6
    assert [version for version, _ in after.publisher.staged] == [2, 3]
    assert after.lines("batches") == whole.lines("batches")
    assert [row["step"] for row in after.lines("metrics")] == [1, 2, 3, 4, 5, 6]
    assert [row["learning_rate"] for row in after.lines("metrics")] == [row["learning_rate"] for row in whole.lines("metrics")]
    assert {line["step"] for line in after.lines("samples")} == {1, 2, 3, 4, 5, 6}
    mine, theirs = after.service.summary(), whole.service.summary()
    for name in ("steps", "policy_version", "reward", "staleness", "trajectories", "tokens"):
        assert mine[name] == theirs[name], name
    assert steps_saved(tmp_path / "torn") == [4, 6]


def test_an_adaptive_bound_goes_on_within_its_window_of_steps(tmp_path):
    """Four of the five steps that are judged together were made before the checkpoint, the fifth after it."""

    def adaptive(**options):
        world = world_of(tmp_path, steps=6, rollout={"max_staleness": "auto"}, checkpoint={"every": 4}, **options)
        world.engine.outcome = lambda batch: StepOutcome(1, 0, {"correction/effective_sample_size": 0.95})
        return world

    async def arriving(world, rows):
        for row in rows:
            await world.arrive(scored(row))
            await asyncio.sleep(10)

    async def story():
        first = adaptive()
        running = asyncio.create_task(first.run())
        await arriving(first, range(4))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        info = Checkpoints(tmp_path).newest_complete()
        assert info.state["staleness_bound"]["adaptive"]["steps"] == 4
        second = adaptive(resume=info)
        second.ledger.attempts.finished_steps = 4
        running = asyncio.create_task(second.run())
        await arriving(second, (4, 5))
        await running
        assert second.ledger.attempts.staleness_bound == 2
        assert [row["staleness/bound"] for row in second.lines("metrics")] == [1, 1, 1, 1, 1, 2]
        told = second.service.summary()["staleness"]
        assert (told["bound_mean"], told["bound_last"]) == (pytest.approx(7 / 6), 2)

    virtual(story())


def test_checkpoints_after_the_one_that_is_resumed_are_of_another_future(tmp_path):
    async def story():
        await trained(world_of(tmp_path, steps=6), range(6))
        info = Checkpoints(tmp_path).complete()[0]
        (tmp_path / "checkpoints" / ".step_000007.writing").mkdir()
        world = world_of(tmp_path, steps=3, resume=info, checkpoint={"every": 100})
        world.ledger.attempts.finished_steps = 2
        await trained(world, [2])
        assert steps_saved(tmp_path) == [2, 3]
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000003"]

    virtual(story())


def test_a_start_from_nothing_leaves_no_later_checkpoint_that_a_next_one_would_take(tmp_path):
    async def story():
        await trained(world_of(tmp_path, steps=6), range(6))
        (tmp_path / "checkpoints" / "step_000006" / "state.json").unlink()  # damaged: it was passed over
        for step in (2, 4):
            shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:06d}")
        world = world_of(tmp_path, steps=1, checkpoint={"every": 100})
        await trained(world, [0])
        assert steps_saved(tmp_path) == [1]
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]

    virtual(story())


def test_a_start_without_a_checkpoint_in_the_same_directory_begins_its_files_anew(tmp_path):
    async def story():
        for _ in range(2):
            world = await trained(world_of(tmp_path, steps=2, checkpoint={"every": 0}), range(2))
            assert [row["step"] for row in world.lines("metrics")] == [1, 2]

    virtual(story())


def test_a_checkpoint_that_cannot_be_loaded_ends_the_run_by_name(tmp_path):
    async def story():
        await trained(world_of(tmp_path, steps=2), range(2))
        info = Checkpoints(tmp_path).newest_complete()
        (info.folder / "engine.json").write_text("{}")
        world = world_of(tmp_path, steps=4, resume=info)
        with pytest.raises(CheckpointError, match="holds no state of this engine"):
            await world.run()
        assert world.publisher.staged == []

    virtual(story())


def test_totals_go_on_in_a_later_start_idleness_too(tmp_path):
    async def story():
        clock = VirtualClock()
        first, second = Tally(clock), Tally(clock)
        first.begin_step()
        with first.meter.waiting("scored groups"):
            await asyncio.sleep(3)
        await asyncio.sleep(1)
        first.add(trained_tokens([scored(0)], 1), StepsOfAge(2, 1), 0.5, failed=False)
        second.restore(json.loads(json.dumps(first.state())))
        assert second.summary() == {**first.summary(), "first_step_time": None}
        await asyncio.sleep(100)  # between two starts nothing counts
        second.begin_step()
        await asyncio.sleep(4)
        assert second.idle_share() == pytest.approx(3 / 8)

    virtual(story())


def test_a_rank_that_is_asked_to_announces_itself_again_once_it_has_anything(tmp_path):
    async def story():
        world = world_of(tmp_path, steps=3, training={"groups_per_step": 2})
        await world.service.reannounce()
        assert not world.publisher.reannounced
        running = asyncio.create_task(world.run())
        await asyncio.sleep(0.5)
        await world.service.reannounce()
        assert world.publisher.reannounced
        await world.service.stop()
        await running

    virtual(story())


def test_held_groups_are_those_of_the_pool_and_of_the_step_that_is_made(tmp_path):
    async def story():
        world = world_of(tmp_path, steps=3, training={"groups_per_step": 2})
        await world.arrive(*(scored(row) for row in range(3)))
        running = asyncio.create_task(world.run())
        await asyncio.sleep(0.5)
        assert sorted(world.service.held()) == ["0/0/0", "0/1/0"]
        await asyncio.sleep(2)
        assert world.service.held() == ["0/2/0"]
        await world.service.stop()
        await running

    virtual(story())
