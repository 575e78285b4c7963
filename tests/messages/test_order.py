"""The order of an epoch is a permutation, the same everywhere, and looks drawn at random."""

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages.order import prompt_order


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000), num_rows=st.integers(0, 300), shuffle=st.booleans())
def test_every_row_stands_at_exactly_one_position(seed, epoch, num_rows, shuffle):
    assert sorted(prompt_order(seed, epoch, num_rows, shuffle)) == list(range(num_rows))


def test_without_shuffle_the_file_order_stands():
    assert list(prompt_order(3, 1, 5, shuffle=False)) == [0, 1, 2, 3, 4]


def test_the_order_is_pinned_so_that_a_resumed_run_and_an_audit_agree_with_an_old_one():
    assert list(prompt_order(0, 0, 10, shuffle=True)) == [2, 6, 5, 7, 1, 3, 4, 0, 8, 9]


def test_epochs_and_seeds_differ():
    orders = {tuple(prompt_order(seed, epoch, 50, True)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_an_endless_source_is_in_its_own_order():
    assert list(islice(prompt_order(0, 0, None, shuffle=True), 4)) == [0, 1, 2, 3]
    assert prompt_order(0, 0, None, shuffle=True)[10**12] == 10**12


def test_a_position_outside_the_epoch_is_refused():
    for position in (-1, 5):
        with pytest.raises(IndexError, match="outside an epoch of 5 rows"):
            prompt_order(0, 0, 5, shuffle=True)[position]


def test_a_huge_epoch_needs_no_table():
    order = prompt_order(0, 0, 10**12, shuffle=True)
    assert len({order[position] for position in range(1000)}) == 1000


@pytest.mark.parametrize("num_rows", [3, 5, 8])
def test_each_row_is_equally_likely_at_each_position(num_rows):
    draws = 2000
    counts = Counter((p, row) for seed in range(draws) for p, row in enumerate(prompt_order(seed, 0, num_rows, True)))
    expected = draws / num_rows
    chi_square = sum((counts[p, r] - expected) ** 2 / expected for p in range(num_rows) for r in range(num_rows))
    degrees = (num_rows - 1) ** 2
    assert chi_square < degrees + 6 * (2 * degrees) ** 0.5
