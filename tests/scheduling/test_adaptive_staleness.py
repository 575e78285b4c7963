"""The controller of the staleness bound: when it moves, when it does not, and that it goes on from its state exactly."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scheduling.adaptive_staleness import WINDOW_STEPS, AdaptiveStaleness

GOOD, MIDDLING, BAD = 0.98, 0.85, 0.6  # effective sample sizes: above, in and below the dead band
shares = st.floats(0, 1)
figures = st.tuples(shares, st.none() | shares)
controllers = st.builds(
    lambda floor, width, every: AdaptiveStaleness(floor, floor + width, every),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 7),
)


def step(controller, starved, ess, *, seconds=2.0):
    """A step that waits for data for this share of its time."""
    return controller.observe(seconds=seconds, starved_seconds=starved * seconds, effective_sample_size=ess)


def bounds(controller, steps, *, starved, ess):
    """The bound after each of so many steps with these figures."""
    found = []
    for _ in range(steps):
        step(controller, starved, ess)
        found.append(controller.bound)
    return found


def a_round(controller):
    """Steps until the next judgement."""
    return controller.settling + controller.window


def test_it_begins_at_the_floor_and_widens_by_one_after_a_window_of_steps_that_starve():
    controller = AdaptiveStaleness(1, 8)
    assert bounds(controller, 5, starved=0.3, ess=GOOD) == [1, 1, 1, 1, 2]


def test_it_goes_on_widening_as_long_as_the_trainer_starves_less_for_it():
    controller = AdaptiveStaleness(1, 4)
    for expected, starved in ((2, 0.6), (3, 0.5), (4, 0.4), (4, 0.3)):
        bounds(controller, a_round(controller), starved=starved, ess=GOOD)
        assert controller.bound == expected


def test_it_stays_where_a_wider_bound_changed_nothing_and_tries_again_when_the_trainer_starves_otherwise():
    controller = AdaptiveStaleness(1, 8)
    for starved, expected in ((0.6, 2), (0.6, 2), (0.58, 2), (0.8, 3), (0.8, 3)):
        bounds(controller, a_round(controller), starved=starved, ess=GOOD)
        assert controller.bound == expected


def test_it_narrows_by_one_when_the_effective_sample_size_falls_however_much_the_trainer_starves():
    controller = AdaptiveStaleness(1, 8)
    controller.bound = 5
    found = bounds(controller, 100, starved=0.9, ess=BAD)
    assert found[:6] == [5, 5, 5, 5, 5, 4]
    assert found[-1] == 1
    assert all(before - after in (0, 1) for before, after in pairwise(found))


def test_in_the_dead_band_and_where_nobody_starves_it_stays():
    controller = AdaptiveStaleness(1, 8)
    controller.bound = 3
    assert set(bounds(controller, 50, starved=0.9, ess=MIDDLING)) == {3}
    assert set(bounds(controller, 50, starved=0.05, ess=GOOD)) == {3}


def test_groups_that_were_admitted_before_a_change_are_not_judged():
    """After 1 → 2 the next two steps take what started under the bound of 1: bad as they are, they say nothing of 2."""
    controller = AdaptiveStaleness(1, 8)
    bounds(controller, 5, starved=0.5, ess=GOOD)
    assert set(bounds(controller, 2, starved=0.5, ess=0.0)) == {2}
    assert bounds(controller, 5, starved=0.0, ess=GOOD) == [2] * 5


def test_one_bad_step_among_good_ones_moves_nothing():
    controller = AdaptiveStaleness(1, 8)
    controller.bound = 3
    for number in range(50):
        step(controller, 0.0, 0.5 if number % 5 == 2 else GOOD)
    assert controller.bound == 3


@pytest.mark.parametrize(
    ("every", "bound", "window"), [(1, 1, 5), (1, 4, 5), (1, 8, 9), (2, 1, 6), (4, 1, 8), (4, 3, 16), (5, 1, 10), (7, 1, 14)]
)
def test_a_window_holds_whole_versions_and_as_many_as_may_be_under_way(every, bound, window):
    assert AdaptiveStaleness(bound, 9, every).window == window


def test_waiting_is_counted_in_seconds_not_in_steps():
    """Groups that started together come together: one long wait, then four steps without any."""
    controller = AdaptiveStaleness(1, 8)
    step(controller, 0.9, GOOD, seconds=10.0)
    changes = [step(controller, 0.0, GOOD, seconds=0.5) for _ in range(4)]
    assert changes[-1].starved == pytest.approx(9 / 12)


def test_a_change_says_why():
    controller = AdaptiveStaleness(1, 8)
    changes = [step(controller, 0.25, GOOD) for _ in range(5)]
    assert changes[:4] == [None] * 4
    assert str(changes[4]) == (
        "staleness bound 1 → 2: the trainer waits for data (waiting 25% of its time, effective sample size 0.980)"
    )


@given(controllers, st.lists(figures, max_size=120))
def test_the_bound_stays_between_floor_and_ceiling_and_moves_by_one_a_window_apart(controller, steps):
    moved = []
    for number, (starved, ess) in enumerate(steps):
        before = controller.bound
        change = step(controller, starved, ess)
        assert controller.floor <= controller.bound <= controller.ceiling
        assert (change is not None) == (controller.bound != before)
        if change is not None:
            assert (change.before, change.now, abs(change.now - change.before)) == (before, controller.bound, 1)
            moved.append(number)
    assert all(later - earlier >= WINDOW_STEPS for earlier, later in pairwise(moved))


@given(controllers, st.lists(figures, max_size=60), st.lists(figures, max_size=60))
def test_from_a_saved_state_it_goes_on_as_if_it_had_never_stopped(controller, before, after):
    for figures_of_a_step in before:
        step(controller, *figures_of_a_step)
    later = AdaptiveStaleness(controller.floor, controller.ceiling, controller.publish_every)
    later.restore(json.loads(json.dumps(controller.state())))
    for figures_of_a_step in after:
        assert step(controller, *figures_of_a_step) == step(later, *figures_of_a_step)
    assert later == controller


@given(controllers, st.lists(st.tuples(shares, shares), max_size=60))
def test_steps_that_trained_nothing_change_nothing(controller, steps):
    other = AdaptiveStaleness(controller.floor, controller.ceiling, controller.publish_every)
    for starved, ess in steps:
        step(controller, starved, ess)
        step(controller, 1.0, None, seconds=100.0)
        step(other, starved, ess)
    assert other == controller


def test_another_floor_or_ceiling_takes_a_restored_bound_in():
    controller = AdaptiveStaleness(1, 16)
    controller.bound = 12
    narrower = AdaptiveStaleness(1, 8)
    narrower.restore(controller.state())
    assert narrower.bound == 8
