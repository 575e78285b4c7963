"""The health of a run: each figure is called out of its range once, with what to do, and sound again only well inside."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.services.trainer.health import FIRST_STEPS, RULES, STEPS, Health, Rule

FIGURE = "correction/effective_sample_size"  # sane from 0.5 on


def judged(values, figure=FIGURE, health=None):
    """What the health says after each step."""
    health = health or Health()
    said = []
    for step, value in enumerate(values, start=1):
        health.judge(step, {figure: value})
        said.append(list(health.lines))
    return said


def test_a_figure_out_of_its_range_is_said_with_the_remedy_and_once_in_the_log(caplog):
    said = judged([0.3] * 30)
    assert said[FIRST_STEPS - 2] == []
    assert all(
        len(lines) == 1 and "0.3" in lines[0] and "lower rollout.max_staleness" in lines[0] for lines in said[FIRST_STEPS:]
    )
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_one_odd_step_is_no_alarm():
    assert judged([0.9] * 20 + [0.01] + [0.9] * 20)[-25:] == [[]] * 25


def test_it_is_sound_again_only_well_inside(caplog):
    said = judged([0.3] * 30 + [0.52] * 200 + [0.9] * 60)
    assert said[229], "0.52 is inside, but not by a tenth"
    assert said[-1] == []
    assert "in its sane range again" in caplog.records[-1].message


def test_a_policy_that_runs_away_from_its_reference_is_said():
    assert judged([0.02] * 30, "kl/mean")[-1] == []
    assert "raise algorithm.kl.coefficient" in judged([0.02] * 30 + [3.0] * 30, "kl/mean")[-1][0]


def test_entropy_is_judged_against_that_of_the_first_steps():
    assert judged([2.0] * 10 + [0.2] * 100, "policy/entropy")[-1] == []
    assert "entropy" in judged([2.0] * 10 + [0.05] * 100, "policy/entropy")[-1][0]


def test_a_step_without_the_figure_changes_nothing():
    health = Health()
    judged([0.3] * 30, health=health)
    before = list(health.lines)
    health.judge(31, {})
    assert health.lines == before


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.figure)
def test_every_rule_has_a_side_that_is_out_and_one_that_is_not(rule: Rule):
    inside = 1.0 if rule.first_share else (rule.low + 0.5 if rule.low is not None else rule.high / 2)
    outside = inside * (rule.low or 1) / 2 if rule.first_share else (rule.low - 0.2 if rule.low is not None else rule.high * 1.2)
    assert judged([inside] * 60, rule.figure)[-1] == []
    assert judged([inside] * 10 + [outside] * 200, rule.figure)[-1] != []


@given(st.lists(st.floats(0, 1), max_size=80))
def test_the_mean_stays_between_the_smallest_and_the_largest(values):
    health = Health()
    judged(values, health=health)
    watched = health._watched[FIGURE]
    assert watched.steps == len(values)
    if values:
        assert min(values) - 1e-9 <= watched.mean <= max(values) + 1e-9


def test_the_mean_forgets_what_was_long_ago():
    health = Health()
    judged([0.0] * 50 + [1.0] * 10 * STEPS, health=health)
    assert health._watched[FIGURE].mean > 0.99
