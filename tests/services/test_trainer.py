"""The leader's decisions, in virtual time: steps, files, ledger, versions, and every way to end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import RunError
from asyncrl.protocols import StepOutcome
from tests.services.trainer_world import TrainerWorld, scored, virtual

NAN = float("nan")


def test_a_step_trains_its_groups_and_leaves_its_lines(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 1})
        await world.arrive(scored(5), scored(7))
        await world.run()
        (batch,) = world.engine.batches
        assert [str(group.id) for group in batch.groups] == ["0/5/0", "0/7/0"]
        assert (batch.step, batch.version, batch.mini_batches) == (1, 0, ((0, 1),))
        (line,) = world.lines("batches")
        assert line == {"step": 1, "version": 0, "groups": ["0/5/0", "0/7/0"], "token_versions": {"min": 0, "max": 0}}
        (row,) = world.lines("metrics")
        assert row["reward/mean"] == row["reward/exact_match"] == 0.5
        assert (row["groups/taken"], row["groups/trained"], row["tokens/trained"], row["staleness/max"]) == (2, 2, 4, 0)
        assert (row["time/train_s"], row["sync/pause_ms"], row["grad/norm"]) == (1.0, 3.0, 1.0)
        assert world.tracker.records[0][:2] == ("trainer", 1)
        assert world.ends() == {"trained": 2}

    virtual(story())


def test_versions_are_published_from_zero_on_after_every_publish_every_steps(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 5, "publish_every": 2})
        for row in range(10):
            await world.arrive(scored(row, versions=(row // 4, row // 4)))
        await world.run()
        assert [version for version, _ in world.publisher.staged] == [0, 1, 2]
        assert [line["version"] for line in world.lines("batches")] == [0, 0, 1, 1, 2]
        assert world.ledger.attempts.final_version == 2

    virtual(story())


def test_only_what_the_step_needs_is_taken_from_the_queue(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 1, "groups_per_step": 3})
        await world.arrive(*(scored(row) for row in range(5)))
        await world.run()
        assert world.receiver.asked == [3]

    virtual(story())


def test_the_end_of_data_trains_the_partial_batch_and_finishes(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path)
        await world.arrive(scored(0), scored(1), scored(2))
        world.receiver.close_stream()
        await world.run()
        assert [line["groups"] for line in world.lines("batches")] == [["0/1/0", "0/0/0"], ["0/2/0"]]
        assert world.service.summary()["steps"] == 2
        assert world.ledger.attempts.final_version == 2
        assert world.receiver.closed
        assert world.publisher.closed
        assert world.tracker.closed

    virtual(story())


def test_groups_without_variance_are_filtered_and_a_step_of_them_alone_still_counts(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 1})
        await world.arrive(scored(0, rewards=(1.0, 1.0)), scored(1, rewards=(0.0, 0.0)))
        await world.run()
        assert world.engine.batches == []
        assert world.lines("batches") == [{"step": 1, "version": 0, "groups": [], "token_versions": None}]
        assert world.lines("metrics")[0]["groups/filtered"] == 2
        assert world.ends() == {"filtered": 2}
        assert [version for version, _ in world.publisher.staged] == [0, 1]

    virtual(story())


def test_refill_ends_what_it_replaces_at_once(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 1, "filter": "refill"})
        await world.arrive(scored(0, rewards=(1.0, 1.0)), scored(1))
        running = asyncio.create_task(world.run())
        await asyncio.sleep(1)
        assert world.ends() == {"filtered": 1, "queued": 1}, "it left live before the step began"
        await world.arrive(scored(2))
        await running
        assert world.lines("batches")[0]["groups"] == ["0/1/0", "0/2/0"]
        assert world.lines("metrics")[0]["groups/filtered"] == 1

    virtual(story())


def test_mask_trains_the_tokens_within_the_bound_and_expires_groups_without_one(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"groups_per_step": 1})
        await world.arrive(scored(0), scored(1), scored(2, versions=(0, 1)), scored(3, versions=(0, 0)))
        world.receiver.close_stream()
        await world.run()
        assert world.engine.batches[2].groups[0].loss_mask.tolist() == [False, True]
        assert world.lines("batches")[2]["token_versions"] == {"min": 1, "max": 1}
        assert world.ends() == {"trained": 3, "failed": 1}, "all steps were made before the last group's turn"

    virtual(story())


def test_a_group_past_the_bound_is_expired_and_under_reissue_asked_for_again(tmp_path):
    async def story(on_stale):
        world = TrainerWorld(tmp_path / on_stale, training={"groups_per_step": 1}, rollout={"on_stale": on_stale})
        await world.arrive(scored(0), scored(1), scored(2), scored(3, versions=(1, 1)))
        await world.run()
        assert [line["groups"] for line in world.lines("batches")] == [["0/0/0"], ["0/1/0"], ["0/3/0"]]
        assert world.ends() == {"trained": 3, "expired": 1}
        assert [str(id) for id in world.ledger.attempts.owed()] == (["0/2/1"] if on_stale == "reissue" else [])
        assert world.lines("metrics")[2]["groups/expired"] == 1

    for on_stale in ("mask", "reissue"):
        virtual(story(on_stale))


def test_wait_lets_no_younger_group_take_the_place_of_an_older_one_on_its_way(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"groups_per_step": 1, "steps": 3}, rollout={"on_stale": "wait"})
        slow = scored(0)
        await world.dispatch(slow)
        await world.arrive(scored(1), scored(2, versions=(1, 1)))
        running = asyncio.create_task(world.run())
        await asyncio.sleep(60)
        assert [line["groups"] for line in world.lines("batches")] == [["0/1/0"]], (
            "row 2 must not overtake row 0 in the last step"
        )
        await world.arrive(slow, started=True)
        await running
        assert [line["groups"] for line in world.lines("batches")] == [["0/1/0"], ["0/0/0"], ["0/2/0"]]
        assert world.ends() == {"trained": 3}
        assert world.lines("metrics")[1]["idle/trainer/an_older_group_s"] > 50

    virtual(story())


def test_a_second_delivery_of_a_group_is_dropped(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 2, "groups_per_step": 1})
        await world.arrive(scored(0))
        world.receiver.put(scored(0), redelivered=True)
        await world.arrive(scored(1))
        await world.run()
        assert [line["groups"] for line in world.lines("batches")] == [["0/0/0"], ["0/1/0"]]

    virtual(story())


def test_a_step_without_a_finite_update_fails_its_groups_and_counts(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 2, "groups_per_step": 1})
        outcomes = {1: StepOutcome(updates=0, bad_updates=1), 2: StepOutcome(updates=1, bad_updates=0)}
        world.engine.outcome = lambda batch: outcomes[batch.step]
        await world.arrive(scored(0), scored(1))
        await world.run()
        assert world.ends() == {"trained": 1, "failed": 1}
        assert world.ledger.samples()["reasons"] == {"failed: non-finite": 1}
        assert [line["groups"] for line in world.lines("batches")] == [[], ["0/1/0"]]
        assert world.lines("metrics")[0]["groups/failed"] == 1
        assert len(world.publisher.staged) == 3

    virtual(story())


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 9, "groups_per_step": 1, "max_bad_steps": 2})
        world.engine.outcome = lambda batch: StepOutcome(updates=0, bad_updates=1)
        await world.arrive(*(scored(row) for row in range(9)))
        with pytest.raises(RunError, match=r"2 steps in a row.*training\.max_bad_steps"):
            await world.run()
        assert len(world.lines("batches")) == 2

    virtual(story())


def test_no_data_for_too_long_ends_the_run_and_says_what_is_missing(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"data_timeout_seconds": 100.0})
        await world.arrive(scored(0))
        await world.dispatch(scored(4))
        with pytest.raises(RunError) as raised:
            await world.run()
        text = str(raised.value)
        assert "100 s (training.data_timeout_seconds)" in text
        assert "lacks 1 of 2 scored groups" in text
        assert "0/4/0 (in flight)" in text

    virtual(story())


def test_stop_ends_a_waiting_trainer_soon_and_leaves_training_unfinished(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path)
        running = asyncio.create_task(world.run())
        await asyncio.sleep(10)
        await world.service.stop()
        async with asyncio.timeout(2):
            await running
        assert world.ledger.attempts.final_version is None
        assert world.service.status()["state"] == "done"

    virtual(story())


def test_mini_batches_and_passes_reach_the_engine(tmp_path):
    async def story():
        sections = {"steps": 1, "groups_per_step": 4, "mini_batches": 3, "epochs_per_batch": 2}
        world = TrainerWorld(tmp_path, training=sections)
        await world.arrive(*(scored(row) for row in range(4)))
        await world.run()
        assert (world.engine.batches[0].mini_batches, world.engine.batches[0].epochs) == (((0, 1), (2,), (3,)), 2)
        assert world.lines("metrics")[0]["updates"] == 6

    virtual(story())


def test_the_learning_rate_follows_its_schedule(tmp_path):
    async def story():
        sections = {"steps": 4, "groups_per_step": 1, "learning_rate": 1.0, "schedule": "linear", "warmup_steps": 2}
        world = TrainerWorld(tmp_path, training=sections)
        await world.arrive(*(scored(row, versions=(row, row)) for row in range(4)))
        await world.run()
        assert [batch.learning_rate for batch in world.engine.batches] == [0.5, 1.0, 1.0, 0.5]
        assert [row["learning_rate"] for row in world.lines("metrics")] == [0.5, 1.0, 1.0, 0.5]

    virtual(story())


def test_samples_keep_one_of_each_group_before_a_second_and_all_that_failed(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 1}, tracking={"samples_per_step": 3})
        await world.arrive(scored(0, rewards=(0.0, 1.0, NAN), versions=(0, 0, 0)), scored(1))
        await world.run()
        lines = world.lines("samples")
        assert [(line["id"], line["state"]) for line in lines] == [
            ("0/1/0/0", "trained"),
            ("0/0/0/0", "trained"),
            ("0/1/0/1", "trained"),
            ("0/0/0/2", "failed"),
        ]
        failed = lines[-1]
        assert (failed["reward"], failed["reason"], failed["response"]) == (None, "reward raised: no", "answer 2")
        assert world.lines("batches")[0]["groups"] == ["0/1/0", "0/0/0"]

    virtual(story())


def test_a_batchs_order_depends_on_its_groups_alone(tmp_path):
    async def story(folder, rows, seed):
        world = TrainerWorld(tmp_path / folder, training={"steps": 1, "groups_per_step": 6}, seed=seed)
        await world.arrive(*(scored(row) for row in rows))
        await world.run()
        orders.append(world.lines("batches")[0]["groups"])

    orders: list[list[str]] = []
    for folder, rows, seed in (("a", range(6), 0), ("b", reversed(range(6)), 0), ("c", range(6), 1)):
        virtual(story(folder, rows, seed))
    assert orders[0] == orders[1] != sorted(orders[0])
    assert orders[2] != orders[0]


def test_the_summary_speaks_of_trained_tokens_only(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"groups_per_step": 1, "steps": 2})
        await world.arrive(scored(0), scored(1, rewards=(1.0, 1.0), versions=(1, 1)))
        await world.run()
        summary = world.service.summary()
        assert summary["steps"] == summary["policy_version"] == 2
        assert summary["reward"] == {"first": 0.75, "last": 0.75}
        assert summary["staleness"] == {
            "bound": 1, "bound_mean": 1.0, "bound_last": 1, "max": 0, "mean": 0.0, "steps_max": 0, "steps_mean": 0.0,
        }  # fmt: skip
        assert summary["trajectories"] == {"trained": 2}
        assert summary["tokens"] == {"trained": 2}
        assert 0 <= summary["idle"]["trainer"] <= 1
        assert summary["first_step_time"] == pytest.approx(world.clock.wall(), abs=3)

    virtual(story())


def test_idleness_counts_from_the_first_batch_on_by_what_was_missing(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"groups_per_step": 1, "steps": 2})
        running = asyncio.create_task(world.run())
        await asyncio.sleep(1000)
        await world.arrive(scored(0))
        await asyncio.sleep(4)
        await world.arrive(scored(1))
        await running
        assert world.lines("metrics")[1]["idle/trainer/scored_groups_s"] == pytest.approx(3.0)
        assert world.service.summary()["idle"]["trainer"] == pytest.approx(3 / 5, abs=0.01)

    virtual(story())


def test_a_group_with_only_untrainable_tokens_is_filtered(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"groups_per_step": 1, "steps": 1, "filter": "keep"})
        await world.arrive(replace(scored(0), loss_mask=np.zeros(2, bool)))
        await world.run()
        assert world.ledger.samples()["reasons"] == {"filtered: no trainable token": 1}

    virtual(story())
