"""Admission: the staleness bound in groups, and the places in trajectories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scheduling.admission import groups_that_fit, may_start, parts_of_group, places_left_for_evaluation

small = st.integers(0, 6)


def test_the_worked_example():
    assert may_start(100, 2, 1, finished_steps=100, total_steps=1000, groups_per_step=4, live=0) == 12


def test_nothing_starts_before_the_first_confirmation():
    assert may_start(None, 4, 1, finished_steps=0, total_steps=10, groups_per_step=4, live=0) == 0


def test_on_policy_starts_exactly_one_batch_per_version():
    assert may_start(0, 0, 1, finished_steps=0, total_steps=10, groups_per_step=4, live=0) == 4
    assert may_start(0, 0, 1, finished_steps=1, total_steps=10, groups_per_step=4, live=0) == 0
    assert may_start(1, 0, 1, finished_steps=1, total_steps=10, groups_per_step=4, live=0) == 4


def test_steps_between_two_publications_count():
    assert may_start(2, 1, 3, finished_steps=7, total_steps=100, groups_per_step=2, live=1) == ((2 + 1 + 1) * 3 - 7) * 2 - 1


def test_no_more_groups_start_than_the_last_steps_can_take():
    assert may_start(8, 4, 1, finished_steps=8, total_steps=10, groups_per_step=4, live=3) == 2 * 4 - 3
    assert may_start(10, 4, 1, finished_steps=10, total_steps=10, groups_per_step=4, live=0) == 0


def test_a_fleet_that_fell_behind_starts_nothing():
    assert may_start(0, 1, 1, finished_steps=5, total_steps=10, groups_per_step=4, live=0) == 0


@given(
    v=small,
    eta=small,
    publish_every=st.integers(1, 4),
    late=small,
    steps=st.integers(1, 40),
    groups=st.integers(1, 8),
    live=small,
)
def test_the_step_that_takes_the_youngest_group_is_at_most_eta_versions_ahead(v, eta, publish_every, late, steps, groups, live):
    finished = min(v * publish_every + late, steps)
    count = may_start(v, eta, publish_every, finished, steps, groups, live)
    if count:
        step_before = finished + (live + count - 1) // groups  # finished when the last of them is taken, in order of start
        assert step_before // publish_every - v <= eta
        assert step_before < steps


@given(v=small, eta=small, publish_every=st.integers(1, 4), steps=st.integers(1, 40), groups=st.integers(1, 8), live=small)
def test_what_may_start_at_once_is_what_may_start_one_by_one(v, eta, publish_every, steps, groups, live):
    def startable(live):
        return may_start(v, eta, publish_every, v * publish_every, steps, groups, live)

    one_by_one = 0
    while startable(live + one_by_one):
        one_by_one += 1
    assert startable(live) == one_by_one


@pytest.mark.parametrize(("free", "expected"), [(0, 0), (7, 0), (8, 1), (23, 2), (24, 3)])
def test_a_group_needs_a_place_for_every_member(free, expected):
    assert groups_that_fit(free, 8, max_concurrent=24) == expected


def test_a_group_larger_than_all_places_starts_alone():
    assert groups_that_fit(5, 16, max_concurrent=5) == 1
    assert groups_that_fit(4, 16, max_concurrent=5) == 0


@given(group_size=st.integers(1, 40), places=st.integers(1, 40))
def test_the_parts_of_a_group_hold_every_member_once_and_fit(group_size, places):
    parts = parts_of_group(group_size, places)
    assert [member for part in parts for member in part] == list(range(group_size))
    assert all(1 <= len(part) <= places for part in parts)


def test_evaluation_gets_what_no_group_waits_for():
    assert places_left_for_evaluation(free=20, startable_groups=2, group_size=8) == 4
    assert places_left_for_evaluation(free=20, startable_groups=3, group_size=8) == 0
    assert places_left_for_evaluation(free=20, startable_groups=0, group_size=8) == 20
