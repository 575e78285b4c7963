"""Micro-batches: every sequence once, within the budget, equal in number on every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scheduling.microbatches import plan_microbatches

LENGTHS = st.lists(st.integers(1, 200), max_size=60)
RANKS = st.integers(1, 5)
BUDGET = st.integers(1, 500)


@given(LENGTHS, BUDGET, RANKS)
def test_every_sequence_is_in_exactly_one_micro_batch(lengths, budget, ranks):
    plan = plan_microbatches(lengths, budget_tokens=budget, ranks=ranks)
    assert sorted(index for rank in plan for cut in rank for index in cut) == list(range(len(lengths)))


@given(LENGTHS, BUDGET, RANKS)
def test_padded_tokens_stay_within_the_budget_unless_one_sequence_alone_exceeds_it(lengths, budget, ranks):
    for rank in plan_microbatches(lengths, budget_tokens=budget, ranks=ranks):
        for cut in rank:
            padded = len(cut) * max((lengths[index] for index in cut), default=0)
            assert padded <= budget or len(cut) == 1


@given(LENGTHS, BUDGET, RANKS)
def test_every_rank_has_the_same_number_and_at_least_one(lengths, budget, ranks):
    counts = {len(rank) for rank in plan_microbatches(lengths, budget_tokens=budget, ranks=ranks)}
    assert len(counts) == 1
    assert counts.pop() >= 1


@given(LENGTHS, BUDGET, RANKS)
def test_no_rank_idles_while_another_has_sequences_to_share(lengths, budget, ranks):
    cuts = [cut for rank in plan_microbatches(lengths, budget_tokens=budget, ranks=ranks) for cut in rank]
    if () in cuts and len(lengths) >= ranks:
        assert max(map(len, cuts)) == 1


def test_short_sequences_fill_one_micro_batch():
    assert plan_microbatches([3, 5, 4], budget_tokens=15, ranks=1) == [[(1, 2, 0)]]


def test_a_small_batch_is_shared_between_ranks():
    plan = plan_microbatches([4] * 8, budget_tokens=1000, ranks=2)
    assert [[len(cut) for cut in rank] for rank in plan] == [[4], [4]]


def test_a_rank_without_a_sequence_keeps_step_with_an_empty_micro_batch():
    assert plan_microbatches([7], budget_tokens=10, ranks=2) == [[(0,)], [()]]
