"""How many responses a server is asked for at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scheduling.concurrency import FULL, ConcurrencyLimit

events = st.lists(
    st.one_of(
        st.tuples(st.just("reported"), st.integers(0, 300), st.integers(0, 300), st.floats(0, 1)),
        st.tuples(st.just("finished"), st.integers(0, 300)),
    ),
    max_size=200,
)


@given(events)
def test_whatever_is_reported_the_limit_stays_within_its_bounds(history):
    limit = ConcurrencyLimit(start=64, lowest=8, highest=128)
    for event in history:
        if event[0] == "reported":
            limit.reported(running=event[1], waiting=event[2], kv_use=event[3])
        else:
            limit.finished(asked=event[1])
        assert 8 <= limit.limit <= 128


def test_a_server_that_queues_or_is_full_is_asked_for_less_and_one_that_keeps_up_for_more():
    limit = ConcurrencyLimit(start=64, lowest=8, highest=128)
    limit.reported(running=64, waiting=30, kv_use=0.5)
    assert limit.limit == 51
    limit.reported(running=51, waiting=0, kv_use=FULL + 0.01)
    assert limit.limit == 40
    limit.reported(running=40, waiting=2, kv_use=0.5)
    assert limit.limit == 40, "a few in the queue are those of this moment"
    for _ in range(40 * 50):
        limit.finished(asked=limit.limit)
    assert limit.limit > 70


def test_a_limit_that_is_not_reached_does_not_grow():
    limit = ConcurrencyLimit(start=64, lowest=8, highest=128)
    for _ in range(1000):
        limit.finished(asked=10)
    assert limit.limit == 64
