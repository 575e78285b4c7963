"""Whole runs in virtual time with a greedy response to each prompt: it is scored, it is the baseline, it never trains."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.simulation.simulate import World
from tests.simulation.histories import assert_every_prompt_ended_once
from tests.simulation.test_losses import every
from tests.simulation.test_losses import run as run_with_losses
from tests.simulation.test_random_worlds import assert_the_summary_is_of_all_lives
from tests.simulation.test_simulate import assert_nothing_is_left, assert_the_bound_held, coin, run

REMAX = {"algorithm": {"advantage": "remax"}}


def scored_by_the_text(item):
    return float(coin(item["response"], 4) == 1)


def is_greedy(member, group_size=2):
    return member.index == group_size


@pytest.mark.parametrize("on_stale", ["mask", "reissue", "wait"])
@pytest.mark.parametrize("filter", ["keep", "drop", "refill"])
def test_every_group_that_trains_has_its_baseline_and_the_ledger_balances(tmp_path, on_stale, filter):
    _, simulated = run(tmp_path, rollout={"on_stale": on_stale}, training={"filter": filter}, steps=100, sections=REMAX)
    assert_nothing_is_left(simulated)
    assert_the_bound_held(tmp_path, 2)
    groups = [group for batch in simulated.batches for group in batch.groups]
    assert groups
    for group in groups:
        assert group.greedy.reward in (0.0, 1.0)
        assert set(group.members.tolist()) <= {0, 1}
        assert filter == "keep" or len({*group.rewards[np.isfinite(group.rewards)].tolist(), group.greedy.reward}) == 2


def test_equal_rewards_train_where_the_greedy_response_did_otherwise(tmp_path):
    """Under a filter that drops what teaches nothing."""
    world = World(reward=scored_by_the_text, step_seconds=lambda batch: 0.3)
    _, simulated = run(tmp_path, world=world, steps=100, sections=REMAX)
    groups = [group for batch in simulated.batches for group in batch.groups]
    alike = [group for group in groups if group.rewards.min() == group.rewards.max()]
    assert 0 < len(alike) < len(groups)
    assert all(group.greedy.reward != group.rewards[0] for group in alike)


@pytest.mark.parametrize("fault", ["generation", "reward"])
def test_a_group_whose_greedy_response_failed_fails_with_that_reason(tmp_path, fault):
    """Every third one fails. The samples of the others train."""

    async def agent(prompt, session):
        await session.generate(prompt.prompt)
        return {"member": session.member}

    def reward(item):
        greedy = item["extra_info"]["agent"]["member"] == 2
        return None if greedy and coin(item["response"], 3) == 0 else scored_by_the_text(item)

    def failure(member):
        return "server lost" if is_greedy(member) and coin(member.rid, 3) == 0 else None

    world = World(failure=failure) if fault == "generation" else World(reward=reward)
    _, simulated = run(tmp_path, agent=agent, world=world, steps=60, sections=REMAX, eval_prompts=None)
    failed = {reason for reason in simulated.ledger.attempts.reasons if reason.startswith("failed")}
    assert "failed: no baseline" in failed
    assert failed <= {"failed: no baseline", "failed: quarantined"}
    assert simulated.ledger.attempts.reasons["failed: no baseline"] > 10
    assert simulated.ledger.attempts.finished_steps == 60
    assert_nothing_is_left(simulated)


def test_one_response_to_a_prompt_trains_against_the_greedy_one(tmp_path):
    reward = {"functions": [{"function": "exact_match"}], "min_scored": 1}
    _, simulated = run(tmp_path, rollout={"group_size": 1}, steps=60, sections={**REMAX, "reward": reward})
    assert_nothing_is_left(simulated)
    groups = [group for batch in simulated.batches for group in batch.groups]
    assert groups
    assert all(group.rewards[0] != group.greedy.reward for group in groups)


@pytest.mark.parametrize("durability", ["none", "process"])
@pytest.mark.parametrize("row", ["rollouter", "reward", "reward/0"])
def test_whoever_dies_every_prompt_ends_once_and_with_its_baseline(tmp_path, row, durability):
    simulated = run_with_losses(tmp_path, every(4.1, row, until=400), durability=durability, sections=REMAX)
    assert simulated.lives[row] > 5
    assert simulated.ledger.attempts.finished_steps == 40
    assert_nothing_is_left(simulated)
    assert_the_bound_held(tmp_path, 2)
    assert_every_prompt_ended_once(simulated, tmp_path)
    assert_the_summary_is_of_all_lives(simulated)
    assert simulated.ledger.attempts.counts()["failed"] == 0
    assert all(group.greedy is not None for batch in simulated.batches for group in batch.groups)


def test_greedy_responses_are_scored_and_not_trained(tmp_path):
    world = World(reward=scored_by_the_text, step_seconds=lambda batch: 0.3)
    _, simulated = run(tmp_path, world=world, steps=40, training={"filter": "keep"}, sections=REMAX)
    scoring, counts = simulated.summary["reward"]["scoring"], simulated.ledger.attempts.counts()
    assert scoring["trajectories"] == scoring["scored"] == 3 * counts["dispatched"]
    assert {tuple(group.members.tolist()) for batch in simulated.batches for group in batch.groups} == {(0, 1)}
    assert simulated.summary["trainer/0"]["trajectories"]["trained"] <= 2 * counts["trained"]
    assert 0 < scoring["components"]["greedy_reward"] < 1
    steps = [metrics for axis, _, metrics in simulated.metrics if axis == "trainer"]
    assert all({"greedy/reward", "greedy/staleness_max"} <= set(metrics) for metrics in steps)
