"""What may change between the starts of one run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.changes import FIXED, changes
from asyncrl.config.load import load_mapping
from asyncrl.config.walk import node

BASE = {
    "model": {"path": "builtin/arithmetic"},
    "data": {"train": "builtin/arithmetic", "eval": "builtin/arithmetic"},
    "rollout": {"max_response_tokens": 8, "max_prompt_tokens": 16},
    "reward": {"functions": [{"function": "exact_match"}]},
    "training": {"steps": 10},
}
OTHER = {
    "seed": 1,
    "data.shuffle": False,
    "rollout.group_size": 4,
    "rollout.temperature": 0.5,
    "training.groups_per_step": 8,
    "training.publish_every": 2,
    "training.steps": 20,
    "training.learning_rate": 0.5,
    "rollout.max_staleness": 4,
    "reward.workers": 2,
    "training.ranks": 2,
    "eval.every": 7,
    "tracking.mlflow": "null",
    "algorithm.loss": "{name: ppo_clip, clip_high: 0.3}",
}


def config(**overrides):
    return load_mapping(BASE, [f"{key}={value}" for key, value in overrides.items()]).config


@given(st.sets(st.sampled_from(sorted(OTHER))))
def test_exactly_what_differs_is_named_and_what_is_fixed_is_refused(keys):
    found = changes(config(), config(**{key: OTHER[key] for key in keys}))
    assert {change.key.removesuffix(".clip_high") for change in found} == keys
    for change in found:
        assert (change.reason is not None) == (change.key in FIXED)
        assert change.key in str(change)


@pytest.mark.parametrize("key", sorted(FIXED))
def test_what_is_fixed_is_a_key_of_the_schema(key):
    assert node(key) is not None


@pytest.mark.parametrize(("before", "now"), [("grpo", "remax"), ("remax", "rloo"), ("grpo", "distillation")])
def test_queued_groups_have_a_greedy_response_or_not(before, now):
    (change,) = changes(config(**{"algorithm.advantage": before}), config(**{"algorithm.advantage": now}))[:1]
    assert "queued groups have a greedy response or a teacher's log-probs only where the advantage needed them" in str(change)


def test_an_advantage_may_take_another_s_place_that_needs_the_same():
    found = changes(config(**{"algorithm.advantage": "rloo"}), config(**{"algorithm.advantage": "opo"}))
    assert [change.reason for change in found] == [None]


def test_a_refusal_says_both_values_the_reason_and_the_fix():
    (change,) = changes(config(), config(**{"rollout.group_size": 4}))
    assert str(change) == (
        "rollout.group_size was 8 and is 4, but queued groups have this many members: "
        "set it back, or start a new run in another folder"
    )
