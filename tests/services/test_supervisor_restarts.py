"""What follows the loss of a process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import load_mapping
from asyncrl.services.supervisor.restarts import GiveUp, RestartPlan, RestartPolicy
from asyncrl.services.supervisor.runtime import Row, rows_of


def config(durability="none", checkpoint_every=10, max_restarts=3):
    return load_mapping(
        {
            "model": {"path": "builtin/arithmetic"},
            "data": {"train": "builtin/arithmetic"},
            "reward": {"functions": [{"function": "exact_match"}], "workers": 2},
            "training": {"steps": 100, "groups_per_step": 4, "ranks": 2},
            "rollout": {"max_response_tokens": 8, "max_prompt_tokens": 16},
            "inference": {"servers": 2},
            "queue": {"durability": durability},
            "checkpoint": {"every": checkpoint_every},
            "cluster": {"max_restarts": max_restarts},
        }
    ).config


def policy(**settings):
    made = config(**settings)
    return RestartPolicy(made, rows_of(made))


def names(plan):
    assert isinstance(plan, RestartPlan), plan
    return [row.name for row in plan.rows]


@pytest.mark.parametrize("row", [Row("reward", 1), Row("reward"), Row("inference", 0), Row("rollouter")])
@pytest.mark.parametrize("durability", ["none", "process", "power"])
def test_a_row_without_followers_is_started_again_alone(row, durability):
    plan = policy(durability=durability).after_loss({row})
    assert names(plan) == [row.name]
    assert not (plan.sets_back)
    assert not (plan.asks_held)
    assert not (plan.reannounces)


def test_trainer_ranks_announce_themselves_to_a_new_parameter_sync():
    plan = policy().after_loss({Row("parameter_sync")})
    assert names(plan) == ["parameter_sync"]
    assert plan.reannounces


def test_a_durable_queue_comes_back_alone_and_another_takes_its_neighbours_along():
    assert names(policy(durability="process").after_loss({Row("message_queue")})) == ["message_queue"]
    plan = policy(durability="none").after_loss({Row("message_queue")})
    assert names(plan) == ["message_queue", "rollouter", "reward"]
    assert plan.asks_held
    assert not plan.sets_back


@pytest.mark.parametrize("durability", ["none", "process"])
def test_a_lost_rank_takes_everybody_back_to_the_checkpoint_and_the_queue_starts_first(durability):
    plan = policy(durability=durability).after_loss({Row("trainer", 1), Row("parameter_sync")})
    assert names(plan) == ["message_queue", "rollouter", "parameter_sync", "reward", "trainer/0", "trainer/1"]
    assert plan.sets_back
    assert not plan.asks_held
    assert not plan.reannounces


def test_without_checkpoints_a_lost_rank_ends_the_run_and_says_why():
    refusal = policy(checkpoint_every=0).after_loss({Row("trainer", 0)})
    assert isinstance(refusal, GiveUp)
    assert "checkpoint.every" in refusal.reason


@pytest.mark.parametrize(("durability", "every"), [("none", 0), ("process", 0), ("none", 5)])
def test_what_keeps_something_to_go_on_from_is_started_again_by_default(durability, every):
    found = policy(durability=durability, checkpoint_every=every, max_restarts=None).after_loss({Row("reward")})
    assert isinstance(found, GiveUp) == ((durability, every) == ("none", 0))


def test_zero_restarts_means_none():
    refusal = policy(max_restarts=0).after_loss({Row("reward", 0)})
    assert isinstance(refusal, GiveUp)
    assert "cluster.max_restarts" in refusal.reason


@given(limit=st.integers(1, 6), step=st.integers(1, 50))
def test_a_row_that_dies_without_progress_is_given_up_and_progress_forgives(limit, step):
    rules = policy(max_restarts=limit)
    for _ in range(3):
        delays = [rules.after_loss({Row("rollouter")}).delay_seconds for _ in range(limit)]
        assert delays[0] == 0.0
        assert delays == sorted(delays)
        step += 1
        rules.step_finished(step)
    for _ in range(limit):
        rules.after_loss({Row("rollouter")})
        rules.step_finished(step)  # made before: no progress
    refusal = rules.after_loss({Row("rollouter")})
    assert isinstance(refusal, GiveUp)
    assert refusal.row == Row("rollouter")
    assert str(limit) in refusal.reason
