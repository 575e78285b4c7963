"""Sets of ids, against Python's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import GroupId
from asyncrl.messages.id_sets import IdSet, RecentIds

rows = st.one_of(st.integers(0, 20), st.integers(4090, 4100), st.integers(0, 2**31))
ids = st.builds(GroupId, st.integers(0, 3), rows, st.integers(0, 2))


@given(st.lists(ids), ids)
def test_a_set_holds_what_was_added_and_nothing_else(added, other):
    found, expected = IdSet(), set()
    assert not found
    for id in added:
        found.add(id)
        expected.add(id)
    assert all(id in found for id in added)
    assert (other in found) == (other in expected)
    assert bool(found) == bool(expected)


@given(st.lists(ids, unique=True, max_size=60), st.integers(1, 8))
def test_the_last_ids_are_known_and_old_ones_are_forgotten(added, capacity):
    recent = RecentIds(capacity)
    for number, id in enumerate(added, 1):
        assert id not in recent
        recent.add(id)
        assert all(known in recent for known in added[max(0, number - capacity) : number])
        assert not any(old in recent for old in added[: max(0, number - 2 * capacity)])
