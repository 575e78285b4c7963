"""What a call comes to: a finite number, or a reason."""

import numpy as np
import pytest

from asyncrl.config.components import component_names
from asyncrl.errors import RewardFailed
from asyncrl.rewards.outcome import CallOutcome, combine, failed, outcome_of, raised, timed_out


@pytest.mark.parametrize(
    ("returned", "score"), [(1, 1.0), (0.5, 0.5), (True, 1.0), (np.float32(0.25), 0.25), ({"score": 2}, 2.0)]
)
def test_numbers_are_scores(returned, score):
    assert outcome_of(returned) == (score, {}, None)


@pytest.mark.parametrize(
    "returned", [None, float("nan"), float("inf"), "1.0", [1.0], np.zeros(2), {"score": None}, {"reward": 1}, {}]
)
def test_anything_else_is_a_failure_and_never_zero(returned):
    outcome = outcome_of(returned)
    assert outcome.score is None
    assert outcome.failure.startswith("returned")


def test_numbers_beside_the_score_are_logged():
    assert outcome_of({"score": 1.0, "length": 3, "nan": float("nan"), "text": "x"}).logged == {"length": 3.0}


def test_an_exception_is_a_reason_of_one_bounded_line():
    assert raised(ValueError("a\nb")).failure == "raised ValueError: a b"
    assert raised(RewardFailed("ground_truth is missing")).failure == "ground_truth is missing"
    assert len(raised(ValueError("x" * 10_000)).failure) <= 300
    assert timed_out(10.0).failure == "timeout after 10 s"
    failed("lone \ud800 surrogate").failure.encode()


def test_the_reward_is_the_weighted_sum():
    score = combine(["a", "b"], [1.0, 0.5], [CallOutcome(1.0, {"n": 2.0}, None), CallOutcome(4.0, {}, None)])
    assert score == (3.0, {"a": 1.0, "b": 4.0}, {"a/n": 2.0}, None)


def test_one_failed_function_fails_the_sample_by_its_name():
    score = combine(["a", "b"], [1.0, 0.5], [CallOutcome(1.0, {}, None), timed_out(2)])
    assert score == (None, {"a": 1.0}, {}, "b: timeout after 2 s")


def test_component_names_are_short_and_distinct():
    names = component_names(["numeric", "my.mod:judge", "dir/file.py:judge", "<not importable>"])
    assert names == ["numeric", "judge", "judge_2", "not_importable"]
