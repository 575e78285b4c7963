"""What the ready-made reward functions compare."""

import time

import pytest

from asyncrl.errors import RewardFailed
from asyncrl.rewards.ready import contains, exact_match, last_number, numeric


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [(" 12\n", "12", 1.0), ("12", 12, 1.0), ("Paris", "paris", 0.0), ("", "12", 0.0), ("b", ["a", "b"], 1.0), ("12.", "12", 0.0)],
)
def test_exact_match_compares_text_stripped_at_its_ends(response, ground_truth, score):
    assert exact_match(response, ground_truth) == score


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [("so it is 12.", "12", 1.0), ("", "12", 0.0), ("Paris", "paris", 0.0), ("a dog", ["cat", " dog "], 1.0)],
)
def test_contains_looks_for_the_ground_truth_anywhere(response, ground_truth, score):
    assert contains(response, ground_truth) == score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,234", 1234.0), ("it costs $-1,234.50.", -1234.5), ("3-5", 5.0), ("x = -5", -5.0), ("6e-3", 0.006), (".5", 0.5),
        ("12.", 12.0), ("50%", 50.0), ("1,2,3", 3.0), ("no number", None), ("", None), ("- and .", None), ("+7", 7.0),
        ("3 apples and 4 pears", 4.0), ("1e999", float("inf")), ("v2x", None), ("9" * 5000, float("inf")),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_a_long_answer_of_digits_and_commas_costs_little():
    began = time.process_time()
    assert last_number("111," * 100_000) == 111.0
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("the answer is 72", "#### 72", 1.0), ("72.0", 72, 1.0), ("71", 72, 0.0), ("I do not know", 72, 0.0),
        ("0.333333", 1 / 3, 1.0), ("0.33", 1 / 3, 0.0), ("5", [4, "5"], 1.0), ("1e999", 3, 0.0),
    ],
)  # fmt: skip
def test_numeric_compares_the_last_numbers(response, ground_truth, score):
    assert numeric(response, ground_truth) == score


@pytest.mark.parametrize("function", [exact_match, contains, numeric])
@pytest.mark.parametrize("ground_truth", [None, [], ["a", None]])
def test_a_missing_ground_truth_is_a_failure_not_a_zero(function, ground_truth):
    with pytest.raises(RewardFailed, match="ground_truth is missing"):
        function("12", ground_truth)


def test_a_ground_truth_that_cannot_be_compared_with_is_a_failure():
    with pytest.raises(RewardFailed, match="holds no number"):
        numeric("12", "twelve")
    with pytest.raises(RewardFailed, match="empty"):
        contains("12", " ")
