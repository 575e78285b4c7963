"""The learning rate: warm-up, schedule, and a total that is known."""

from __future__ import annotations

import math

import pytest

from asyncrl.scheduling.learning_rate import learning_rate


def rates(schedule: str, *, steps: int = 10, warmup: int = 0, final: float = 0.0, peak: float = 2.0) -> list[float]:
    return [
        learning_rate(step, peak=peak, total_steps=steps, warmup_steps=warmup, schedule=schedule, final_factor=final)
        for step in range(1, steps + 1)
    ]


def test_constant_is_the_peak_from_the_first_step():
    assert rates("constant") == [2.0] * 10


def test_warm_up_rises_in_equal_parts_and_the_first_step_moves():
    assert rates("constant", warmup=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_falls_in_equal_parts_to_just_above_its_end():
    assert rates("linear", steps=4) == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_linear_ends_at_the_final_factor():
    assert rates("linear", steps=4, final=0.5) == pytest.approx([2.0, 1.75, 1.5, 1.25])


def test_cosine_is_half_way_down_in_the_middle():
    assert rates("cosine", steps=4) == pytest.approx([2.0, 1 + math.cos(math.pi / 4), 1.0, 1 - math.cos(math.pi / 4)])


def test_the_schedule_begins_after_the_warm_up():
    assert rates("linear", steps=6, warmup=2) == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5])


def test_a_warm_up_as_long_as_the_training_reaches_the_peak_at_its_end():
    assert rates("cosine", steps=3, warmup=3) == pytest.approx([2 / 3, 4 / 3, 2.0])
