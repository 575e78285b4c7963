"""Mini-batches: consecutive, and different by one group at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scheduling.minibatches import cut_minibatches


@given(st.integers(0, 100), st.integers(1, 12))
def test_every_group_is_in_one_part_and_sizes_differ_by_one_at_most(num_groups, mini_batches):
    cuts = cut_minibatches(num_groups, mini_batches)
    assert [index for cut in cuts for index in cut] == list(range(num_groups))
    sizes = [len(cut) for cut in cuts]
    assert len(sizes) == min(num_groups, mini_batches)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_a_shrunken_batch_is_cut_into_equal_parts():
    assert cut_minibatches(7, 3) == ((0, 1, 2), (3, 4), (5, 6))


def test_no_group_gives_no_mini_batch():
    assert cut_minibatches(0, 4) == ()
