"""Whole runs in virtual time with a teacher: it judges every response beside the reward functions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from asyncrl.protocols import Judgement
from asyncrl.simulation.simulate import World
from asyncrl.simulation.teacher import by_the_tokens
from tests.simulation.histories import assert_every_prompt_ended_once
from tests.simulation.test_losses import every
from tests.simulation.test_losses import run as run_with_losses
from tests.simulation.test_random_worlds import assert_the_summary_is_of_all_lives
from tests.simulation.test_simulate import ROUGH, assert_nothing_is_left, assert_the_bound_held, run

DISTILLED = {"algorithm": {"advantage": "distillation", "teacher": {"path": "teacher"}}}


def groups_of(simulated):
    return [group for batch in simulated.batches for group in batch.groups]


def assert_judged(group):
    for member, end in enumerate(np.cumsum(group.lengths)):
        tokens = slice(end - group.lengths[member], end)
        expected = by_the_tokens(group.prompt_tokens, group.response_tokens[tokens]).log_probs
        if np.isfinite(group.rewards[member]):
            np.testing.assert_array_equal(group.teacher_log_probs[tokens], expected)


@pytest.mark.parametrize("seconds", [0.0, 3.0])
@pytest.mark.parametrize("on_stale", ["mask", "reissue", "wait"])
def test_every_response_that_trains_was_judged_token_by_token(tmp_path, on_stale, seconds):
    world = dataclasses.replace(ROUGH, judge_seconds=seconds)
    _, simulated = run(tmp_path, rollout={"on_stale": on_stale}, world=world, steps=60, sections=DISTILLED)
    assert_nothing_is_left(simulated)
    assert_the_bound_held(tmp_path, 2)
    assert groups_of(simulated)
    for group in groups_of(simulated):
        assert_judged(group)


def test_equal_rewards_filter_nothing(tmp_path):
    _, simulated = run(tmp_path, world=World(reward=lambda item: 1.0), steps=30, sections=DISTILLED)
    assert simulated.ledger.attempts.counts()["filtered"] == 0
    assert len(groups_of(simulated)) == 60
    assert_nothing_is_left(simulated)


def test_a_response_that_the_teacher_does_not_judge_is_a_failed_sample(tmp_path):
    def judge(prompt, response):
        return Judgement(None, "no answer within 60 s") if len(response) % 3 == 0 else by_the_tokens(prompt, response)

    sections = {**DISTILLED, "reward": {"functions": [{"function": "exact_match"}], "min_scored": 1}}
    _, simulated = run(tmp_path, world=dataclasses.replace(ROUGH, judge=judge), steps=60, sections=sections)
    assert_nothing_is_left(simulated)
    failures = [failure for group in groups_of(simulated) for failure in group.failures if failure]
    assert "the teacher did not judge it: no answer within 60 s" in failures
    assert "failed: too few scored" in simulated.ledger.attempts.reasons
    for group in groups_of(simulated):
        assert_judged(group)
        assert not (group.lengths[np.isfinite(group.rewards)] % 3 == 0).any()


@pytest.mark.parametrize("durability", ["none", "process"])
@pytest.mark.parametrize("row", ["rollouter", "reward", "reward/0"])
def test_whoever_dies_every_prompt_ends_once(tmp_path, row, durability):
    losses = every(4.1, row, until=400)
    simulated = run_with_losses(tmp_path, losses, durability=durability, sections=DISTILLED, world={"judge_seconds": 0.7})
    assert simulated.lives[row] > 5
    assert simulated.ledger.attempts.finished_steps == 40
    assert_nothing_is_left(simulated)
    assert_every_prompt_ended_once(simulated, tmp_path)
    assert_the_summary_is_of_all_lives(simulated)
    assert simulated.ledger.attempts.counts()["failed"] == 0
