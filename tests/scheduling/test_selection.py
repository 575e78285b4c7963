"""The pick: the staleness rules, the filter, and what they promise over long random runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.messages import GreedyResponse, GroupId, ScoredGroup
from asyncrl.scheduling.selection import Candidate, SelectionRules, Selector, candidate_of, narrow, split_filtered
from tests.scheduling.selection_world import World

RULES = SelectionRules(2, 1, 1, "mask", "drop", 2.0)


def candidate(row: int, oldest: int | None = 0, newest: int | None = None, equal: bool = False) -> Candidate:
    return Candidate(GroupId(0, row, 0), oldest, oldest if newest is None else newest, equal)


def selector(*candidates: Candidate, **changes: object) -> Selector:
    made = Selector(replace(RULES, **changes))
    for each in candidates:
        made.add(each)
    return made


def rows(groups: tuple) -> list[int]:
    return [group.id.row for group in groups]


def scored_group(**changes: object) -> ScoredGroup:
    """Two members of 3 and 2 tokens, versions 0 1 2 and 3 3."""
    group = ScoredGroup(
        id=GroupId(0, 0, 0),
        group_size=2,
        start_version=0,
        prompt_tokens=np.array([1, 2], np.int32),
        members=np.array([0, 1], np.int32),
        lengths=np.array([3, 2], np.int32),
        response_tokens=np.array([3, 4, 5, 6, 7], np.int32),
        loss_mask=np.ones(5, bool),
        log_probs=np.zeros(5, np.float32),
        versions=np.array([0, 1, 2, 3, 3], np.int32),
        rewards=np.array([0.0, 1.0], np.float32),
        components={},
        finish_reasons=["stop", "stop"],
        failures=[None, None],
        prompt="p",
        responses=["a", "b"],
    )
    return replace(group, **changes)


# ---- a group as a pick sees it ---------------------------------------------------------------------------------


def test_a_candidate_spans_the_versions_of_its_trainable_tokens():
    masked = scored_group(loss_mask=np.array([False, True, True, True, False]))
    assert candidate_of(masked) == Candidate(GroupId(0, 0, 0), 1, 3, equal_rewards=False)


def test_tokens_of_a_member_without_reward_do_not_count():
    group = scored_group(rewards=np.array([np.nan, 1.0], np.float32), failures=["reward raised", None])
    assert candidate_of(group) == Candidate(GroupId(0, 0, 0), 3, 3, equal_rewards=True)


def test_equal_rewards_means_largest_is_smallest_not_zero_deviation():
    rewards = np.full(2, 0.3, np.float32)
    assert candidate_of(scored_group(rewards=rewards)).equal_rewards
    rewards[1] = np.nextafter(rewards[1], np.float32(1))
    assert not candidate_of(scored_group(rewards=rewards)).equal_rewards


def test_a_greedy_response_that_differs_gives_equal_rewards_an_advantage():
    rewards = np.full(2, 0.3, np.float32)
    equal, better = (GreedyResponse(float(reward), 0, 1) for reward in np.float32([0.3, 0.8]))
    assert candidate_of(scored_group(rewards=rewards, greedy=equal)).equal_rewards
    assert not candidate_of(scored_group(rewards=rewards, greedy=better)).equal_rewards


def test_a_group_that_a_teacher_judged_teaches_something_whatever_its_rewards():
    judged = scored_group(rewards=np.ones(2, np.float32), teacher_log_probs=np.zeros(5, np.float32))
    assert not candidate_of(judged).equal_rewards


def test_one_response_has_an_advantage_over_the_greedy_one():
    one = {"rewards": np.array([np.nan, 1.0], np.float32), "failures": ["reward raised", None]}
    assert not candidate_of(scored_group(**one, greedy=GreedyResponse(0.0, 0, 1))).equal_rewards


def test_narrowing_leaves_exactly_the_tokens_within_the_bound():
    group = narrow(scored_group(), version=3, max_staleness=1)
    assert group.loss_mask.tolist() == [False, False, True, True, True]
    assert group.rewards.tolist() == [0.0, 1.0]


def test_narrowing_drops_the_tokens_of_unscored_members():
    group = narrow(scored_group(rewards=np.array([0.0, np.nan], np.float32)), version=0, max_staleness=5)
    assert group.loss_mask.tolist() == [True, True, True, False, False]


# ---- a step begins ---------------------------------------------------------------------------------------------


def test_a_step_takes_groups_in_the_order_they_came():
    assert rows(selector(candidate(2), candidate(1), candidate(0)).decide(0).taken) == [2, 1]


def test_too_few_groups_begin_no_step():
    decision = selector(candidate(0)).decide(0)
    assert decision.taken is None
    assert decision.wanted == 1


def test_the_end_of_data_begins_a_step_with_what_is_there_and_then_none():
    pick = selector(candidate(0))
    assert rows(pick.decide(0, closed=True).taken) == [0]
    assert pick.decide(1, closed=True).taken is None


def test_mask_expires_only_a_group_with_no_token_left():
    decision = selector(candidate(0, oldest=0, newest=1), candidate(1, oldest=0, newest=2)).decide(3, closed=True)
    assert [(each.id.row, each.state, each.reissue) for each in decision.leaving] == [(0, "expired", False)]
    assert rows(decision.taken) == [1]


def test_reissue_expires_a_group_with_any_token_past_the_bound_and_asks_again():
    decision = selector(candidate(0, oldest=1, newest=3), candidate(1, oldest=2), on_stale="reissue").decide(3, closed=True)
    assert [(each.id.row, each.state, each.reissue) for each in decision.leaving] == [(0, "expired", True)]
    assert rows(decision.taken) == [1]


def test_the_bound_counts_versions_not_steps():
    decision = selector(candidate(0, oldest=0), publish_every=4).decide(7, closed=True)
    assert rows(decision.taken) == [0]
    assert selector(candidate(0, oldest=0), publish_every=4).decide(8, closed=True).taken is None


def test_on_policy_takes_only_the_present_version():
    pick = selector(candidate(0, oldest=4), candidate(1, oldest=5), candidate(2, oldest=5), max_staleness=0, on_stale="reissue")
    decision = pick.decide(5)
    assert rows(decision.taken) == [1, 2]
    assert rows(decision.leaving) == [0]


# ---- the filter ------------------------------------------------------------------------------------------------


def test_drop_fills_the_step_and_filters_within_it():
    taken = selector(candidate(0, equal=True), candidate(1)).decide(0).taken
    trains, filtered = split_filtered(taken, "drop")
    assert rows(trains) == [1]
    assert [(each.id.row, reason) for each, reason in filtered] == [(0, "zero variance")]


def test_keep_trains_equal_rewards_but_not_a_group_without_tokens():
    trains, filtered = split_filtered((candidate(0, equal=True), candidate(1, oldest=None)), "keep")
    assert rows(trains) == [0]
    assert [(each.id.row, reason) for each, reason in filtered] == [(1, "no trainable token")]


def test_refill_replaces_at_once_and_takes_others():
    pick = selector(candidate(0, equal=True), candidate(1), candidate(2), filter="refill")
    decision = pick.decide(0)
    assert [(each.id.row, each.state) for each in decision.leaving] == [(0, "filtered")]
    assert rows(decision.taken) == [1, 2]


def test_refill_looks_at_no_more_than_its_factor_of_a_step():
    pick = selector(*(candidate(row, equal=True) for row in range(3)), candidate(3), candidate(4), filter="refill")
    decision = pick.decide(0)
    assert rows(decision.leaving) == [0, 1]
    assert rows(decision.taken) == [2, 3], "2 groups a step × max_refill_factor 2 = 4 looked at"
    assert rows(split_filtered(decision.taken, "refill")[0]) == [3]
    assert rows(pick.decide(1, closed=True).taken) == [4], "the next step starts its count anew"


def test_refill_may_leave_a_step_with_nothing_to_train():
    decision = selector(*(candidate(row, equal=True) for row in range(4)), filter="refill").decide(0)
    assert split_filtered(decision.taken, "refill")[0] == []
    assert len(decision.leaving) == 2


# ---- wait ------------------------------------------------------------------------------------------------------


def test_wait_takes_the_earliest_expiry_first():
    assert rows(selector(candidate(0, 3), candidate(1, 2), candidate(2, 2), on_stale="wait").decide(3).taken) == [1, 2]


def test_wait_lets_younger_groups_overtake_while_the_older_still_fit():
    pick = selector(candidate(0, 3), candidate(1, 3), on_stale="wait")
    assert rows(pick.decide(3, coming=[3, 3]).taken) == [0, 1]


def test_wait_waits_when_the_older_would_no_longer_fit():
    pick = selector(candidate(0, 3), candidate(1, 3), on_stale="wait")
    decision = pick.decide(3, coming=[2])
    assert decision.taken is None
    assert decision.out_of_order


def test_wait_counts_all_that_expire_by_a_version_together():
    pick = selector(candidate(0, 4), candidate(1, 4), on_stale="wait")
    assert pick.decide(3, coming=[3, 3]).taken is not None
    pick = selector(candidate(0, 4), candidate(1, 4), on_stale="wait")
    assert pick.decide(3, coming=[3, 3, 3]).taken is None


def test_wait_does_not_wait_where_waiting_mends_nothing():
    pick = selector(candidate(0, 2), candidate(1, 2), on_stale="wait")
    assert pick.decide(3, coming=[2]).taken is not None


def test_wait_expires_what_admission_let_grow_too_old():
    decision = selector(candidate(0, 0), on_stale="wait").decide(5, closed=True)
    assert rows(decision.leaving) == [0]


# ---- promises --------------------------------------------------------------------------------------------------

RULE_SPACE = st.builds(
    SelectionRules,
    groups_per_step=st.integers(1, 5),
    publish_every=st.integers(1, 3),
    max_staleness=st.integers(1, 4),
    on_stale=st.sampled_from(["mask", "reissue", "wait"]),
    filter=st.sampled_from(["keep", "drop", "refill"]),
    max_refill_factor=st.floats(1.0, 3.0),
)


@given(RULE_SPACE, st.integers(0, 2**32), st.booleans(), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_every_group_ends_once_and_nothing_past_the_bound_trains(rules, seed, slow, lag):
    world = World(rules, steps=40, seed=seed, lag=lag, slow=slow).run()
    if rules.on_stale == "wait":
        assert "expired" not in world.ended.values()
    assert set(world.sizes) == {rules.groups_per_step}


@pytest.mark.parametrize("on_stale", ["mask", "reissue", "wait"])
def test_on_policy_never_trains_an_older_token(on_stale):
    World(SelectionRules(3, 1, 0, on_stale, "drop", 1.0), steps=300, seed=1, lag=4).run()


@pytest.mark.parametrize("filter", ["keep", "drop", "refill"])
def test_under_wait_nothing_expires_over_thousands_of_steps(filter):
    world = World(SelectionRules(4, 1, 2, "wait", filter, 2.0), steps=1500, seed=7, lag=6, slow=True).run()
    ends = Counter(world.ended.values())
    assert ends["expired"] == 0
    assert ends["trained"] > 1500
    assert world.waited_out_of_order > 0, "the rule was put to the test"


@pytest.mark.parametrize("on_stale", ["mask", "reissue", "wait"])
def test_nothing_past_the_bound_trains_when_admission_fails(on_stale):
    world = World(SelectionRules(2, 1, 1, on_stale, "drop", 1.0), steps=100, seed=3, slow=True, admits=False).run()
    assert "expired" in world.ended.values()
