"""Two verdicts in either order make one score."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import TrajectoryId
from asyncrl.protocols import Judgement
from asyncrl.scheduling.groups import MemberScore
from asyncrl.scheduling.pairing import Pairing

ID = TrajectoryId(0, 0, 0, 0)
GOOD = Judgement(np.array([-1.0, -2.0], np.float32))


def whole(score: MemberScore, judgement: Judgement, *, teacher_first: bool) -> MemberScore:
    pairing = Pairing()
    pairing.expect(ID)
    calls = [lambda: pairing.score(ID, score), lambda: pairing.judge(ID, judgement)]
    first, second = reversed(calls) if teacher_first else calls
    assert first() is None
    found = second()
    assert found is not None
    assert not len(pairing)
    return found


@pytest.mark.parametrize("teacher_first", [False, True])
def test_a_sample_has_its_score_and_its_log_probs(teacher_first: bool) -> None:
    found = whole(MemberScore(0.5), GOOD, teacher_first=teacher_first)
    assert (found.reward, found.failure) == (0.5, None)
    assert found.teacher_log_probs is GOOD.log_probs


@pytest.mark.parametrize("teacher_first", [False, True])
def test_one_that_the_teacher_did_not_judge_has_failed(teacher_first: bool) -> None:
    found = whole(MemberScore(0.5), Judgement(None, "no answer"), teacher_first=teacher_first)
    assert (found.reward, found.failure) == (None, "the teacher did not judge it: no answer")


def test_where_both_fail_the_reward_s_reason_stands() -> None:
    found = whole(MemberScore(None, failure="it raised"), Judgement(None, "no answer"), teacher_first=True)
    assert found.failure == "it raised"


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40))
def test_every_expected_sample_is_given_out_at_most_once(events: list[tuple[int, bool]]) -> None:
    pairing, given_out = Pairing(), []
    for member in range(4):
        pairing.expect(TrajectoryId(0, 0, 0, member))
    for member, is_score in events:
        id = TrajectoryId(0, 0, 0, member)
        if (pairing.score(id, MemberScore(1.0)) if is_score else pairing.judge(id, GOOD)) is not None:
            given_out.append(member)
    both = {member for member, _ in events if {(member, True), (member, False)} <= set(events)} - {4}
    assert sorted(given_out) == sorted(both)
    assert len(pairing) == 4 - len(both)
