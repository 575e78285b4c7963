"""Trajectories in any interleaving close their groups, each once."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.messages import GroupId, ScoredGroup, TrajectoryId
from asyncrl.scheduling import groups
from asyncrl.scheduling.groups import FailedGroup, GroupAssembler, MemberScore
from tests.messages.samples import trajectory


def failed(row=0, member=0, reason="server lost", group_size=2):
    empty = trajectory(row, member, num_tokens=0, group_size=group_size)
    return dataclasses.replace(empty, failure=reason, finish_reason="failed", response="")


def reward(value):
    return MemberScore(value, {"exact_match": value}, {"length": 10 * value})


def test_a_group_closes_with_its_last_member():
    assembler = GroupAssembler(min_scored=2)
    assert assembler.accept(trajectory(0, 1, num_tokens=3, group_size=2))
    assert assembler.accept(trajectory(0, 0, num_tokens=2, group_size=2))
    assembler.record(TrajectoryId(0, 0, 0, 1), reward(1.0))
    assert assembler.take_closed() == []
    assert assembler.open_groups() == [GroupId(0, 0, 0)]
    assembler.record(TrajectoryId(0, 0, 0, 0), reward(0.0))
    (group,) = assembler.take_closed()
    assert isinstance(group, ScoredGroup)
    assert group.members.tolist() == [0, 1]
    assert group.lengths.tolist() == [2, 3]
    assert group.response_tokens.tolist() == [0, 1, 0, 1, 2]
    assert group.rewards.tolist() == [0.0, 1.0]
    assert group.components["exact_match"].tolist() == [0.0, 1.0]
    assert group.metrics == {"length": 5.0}
    assert (group.rewards.dtype, group.versions.dtype, group.loss_mask.dtype) == (np.float32, np.int32, np.bool_)
    assert assembler.take_closed() == []
    assert assembler.open_groups() == []


def test_a_member_that_could_not_be_generated_counts_and_needs_no_score():
    assembler = GroupAssembler(min_scored=1)
    assert not assembler.accept(failed(0, 0))
    assert assembler.accept(trajectory(0, 1, num_tokens=3, group_size=2))
    assembler.record(TrajectoryId(0, 0, 0, 1), reward(1.0))
    (group,) = assembler.take_closed()
    assert np.isnan(group.rewards[0])
    assert group.rewards[1] == 1.0
    assert group.failures == ["server lost", None]
    assert group.num_scored == 1


def test_a_member_that_could_not_be_scored_keeps_its_tokens_and_its_reason():
    assembler = GroupAssembler(min_scored=1)
    for member in range(2):
        assembler.accept(trajectory(0, member, num_tokens=3, group_size=2))
    assembler.record(TrajectoryId(0, 0, 0, 0), MemberScore(None, {"a": 1.0}, {}, "b: timeout after 1 s"))
    assembler.record(TrajectoryId(0, 0, 0, 1), MemberScore(3.0, {"a": 1.0, "b": 2.0}))
    (group,) = assembler.take_closed()
    assert group.lengths.tolist() == [3, 3]
    assert group.failures == ["b: timeout after 1 s", None]
    assert np.isnan(group.components["b"][0])
    assert group.components["a"].tolist() == [1.0, 1.0]


def test_too_few_scored_members_fail_the_group_with_the_most_common_reason():
    assembler = GroupAssembler(min_scored=2)
    for member, reason in enumerate(["x", "y", "y"]):
        assembler.accept(failed(0, member, reason, group_size=4))
    assembler.accept(trajectory(0, 3, group_size=4))
    assembler.record(TrajectoryId(0, 0, 0, 3), reward(1.0))
    (group,) = assembler.take_closed()
    assert isinstance(group, FailedGroup)
    assert group.reason == "too few scored: 1 of 4, y"
    assert group.failures == ("x", "y", "y", None)
    assert [t.id.member for t in group.trajectories] == [0, 1, 2, 3]


def test_second_copies_are_dropped_before_and_after_the_group_has_closed():
    assembler = GroupAssembler(min_scored=1)
    assert assembler.accept(trajectory(0, 0, group_size=1))
    assert not assembler.accept(trajectory(0, 0, group_size=1))
    assembler.record(TrajectoryId(0, 0, 0, 0), reward(1.0))
    assembler.record(TrajectoryId(0, 0, 0, 0), reward(1.0))
    assert not assembler.accept(trajectory(0, 0, group_size=1))
    assert len(assembler.take_closed()) == 1
    assert (assembler.counts.duplicates, assembler.counts.late, assembler.open_groups()) == (2, 1, [])


def test_another_attempt_at_the_same_prompt_is_another_group():
    assembler = GroupAssembler(min_scored=1)
    for attempt in range(2):
        assert assembler.accept(trajectory(0, 0, group_size=1, attempt=attempt))
        assembler.record(TrajectoryId(0, 0, attempt, 0), reward(1.0))
    assert [group.id.attempt for group in assembler.take_closed()] == [0, 1]


def test_members_that_contradict_their_group_are_counted_and_dropped():
    assembler = GroupAssembler(min_scored=1)
    assert not assembler.accept(trajectory(0, 2, group_size=2))
    assert assembler.open_groups() == []
    assert assembler.accept(trajectory(0, 0, group_size=2))
    assert not assembler.accept(trajectory(0, 1, group_size=3))
    assert assembler.counts.strays == 2


def test_groups_that_miss_a_member_at_the_end_of_the_data_fail():
    assembler = GroupAssembler(min_scored=1)
    assembler.accept(trajectory(0, 0, group_size=2))
    assembler.record(TrajectoryId(0, 0, 0, 0), reward(1.0))
    assembler.close_incomplete()
    (group,) = assembler.take_closed()
    assert group.reason == "members missing at the end of the data: 1 of 2 came"


def greedy_group(*scores, baseline, min_scored=1):
    """The one group that closes with samples of these scores and a greedy response of that one."""
    assembler, size = GroupAssembler(min_scored, with_greedy=True), len(scores)
    for member, score in enumerate([*scores, baseline]):
        assert assembler.take_closed() == []
        assembler.accept(trajectory(0, member, group_size=size))
        assembler.record(TrajectoryId(0, 0, 0, member), score)
    (group,) = assembler.take_closed()
    return group


def test_the_greedy_response_is_the_baseline_and_no_member():
    group = greedy_group(reward(1.0), reward(0.0), baseline=reward(0.3))
    assert group.members.tolist() == [0, 1]
    assert (group.rewards.tolist(), len(group.responses), len(group.lengths)) == ([1.0, 0.0], 2, 2)
    assert group.metrics == {"length": 5.0}
    assert group.greedy.reward == np.float32(0.3), "so that an equal reward is no advantage"


def test_the_greedy_response_may_be_of_other_versions():
    assembler = GroupAssembler(min_scored=1, with_greedy=True)
    older = dataclasses.replace(trajectory(0, 1, num_tokens=2, group_size=1), versions=np.array([3, 5], np.int32))
    for each in (older, trajectory(0, 0, group_size=1)):
        assembler.accept(each)
        assembler.record(each.id, reward(1.0))
    (group,) = assembler.take_closed()
    assert (group.greedy.oldest, group.greedy.newest) == (3, 5)
    assert not group.versions.any()


def test_a_group_without_its_baseline_has_failed_with_the_reason():
    group = greedy_group(reward(1.0), reward(0.0), baseline=MemberScore(None, failure="timeout after 1 s"))
    assert isinstance(group, FailedGroup)
    assert group.reason == "no baseline: the greedy response failed, timeout after 1 s"
    assert [each.is_greedy for each in group.trajectories] == [False, False, True]


def test_the_greedy_response_does_not_count_as_a_scored_sample():
    group = greedy_group(reward(1.0), MemberScore(None, failure="x"), baseline=reward(1.0), min_scored=2)
    assert group.reason == "too few scored: 1 of 2, x"


def test_where_none_is_asked_for_a_greedy_response_is_a_stray():
    assembler = GroupAssembler(min_scored=1)
    assert not assembler.accept(trajectory(0, 2, group_size=2))
    assert assembler.counts.strays == 1


def test_memory_of_closed_groups_is_bounded(monkeypatch):
    monkeypatch.setattr(groups, "CLOSED_REMEMBERED", 10)
    assembler = GroupAssembler(min_scored=1)
    for row in range(100):
        assembler.accept(failed(row, 0, group_size=1))
    assert GroupId(0, 99, 0) in assembler._remembered
    assert GroupId(0, 70, 0) not in assembler._remembered


@st.composite
def histories(draw):
    """(group size, min_scored, with a greedy response, events): every member of some groups arrives, some twice, in any order;
    each has a fate."""
    size = draw(st.integers(1, 4))
    num_groups, with_greedy = draw(st.integers(1, 4)), draw(st.booleans())
    ids = [TrajectoryId(0, row, 0, member) for row in range(num_groups) for member in range(size + with_greedy)]
    fates = {id: draw(st.sampled_from(["scored", "scored", "no score", "not generated"])) for id in ids}
    copies = draw(st.lists(st.sampled_from(ids), max_size=5))
    order = draw(st.permutations(ids + copies))
    return size, draw(st.integers(1, 4)), with_greedy, fates, order, draw(st.randoms(use_true_random=False))


@given(histories())
@settings(max_examples=300, deadline=None)
def test_every_group_closes_exactly_once_and_accounts_for_every_member(history):
    size, min_scored, with_greedy, fates, order, random = history
    assembler = GroupAssembler(min_scored, with_greedy=with_greedy)
    waiting, closed = [], []
    for id in order:
        if fates[id] == "not generated":
            assert not assembler.accept(failed(id.row, id.member, group_size=size))
        elif assembler.accept(trajectory(id.row, id.member, group_size=size)):
            waiting.append(id)
        while waiting and random.random() < 0.5:
            _score(assembler, waiting.pop(random.randrange(len(waiting))), fates)
        closed += assembler.take_closed()
    for id in waiting:
        _score(assembler, id, fates)
    closed += assembler.take_closed()

    assert sorted(group.id for group in closed) == sorted({id.group for id in fates})
    assert assembler.open_groups() == []
    assert assembler.num_unscored == 0
    assert assembler.counts.duplicates == len(order) - len(fates)
    assert assembler.counts.trajectories == len(fates)
    for group in closed:
        num_scored = sum(fates[group.id.member(member)] == "scored" for member in range(size))
        has_baseline = fates.get(group.id.member(size), "scored") == "scored"
        assert isinstance(group, ScoredGroup) == (num_scored >= min_scored and has_baseline)
        if isinstance(group, ScoredGroup):
            assert group.num_scored == num_scored
            assert (group.greedy is not None) == with_greedy
            assert len(group.failures) == len(group.responses) == len(group.finish_reasons) == size
            assert group.lengths.sum() == len(group.response_tokens) == len(group.versions)
            assert all((f is None) == np.isfinite(r) for f, r in zip(group.failures, group.rewards, strict=True))
        elif num_scored < min_scored:
            assert group.reason.startswith(f"too few scored: {num_scored} of {size}")
        else:
            assert group.reason.startswith("no baseline")


def _score(assembler, id, fates):
    assembler.record(id, reward(1.0) if fates[id] == "scored" else MemberScore(None, failure="timeout after 1 s"))
