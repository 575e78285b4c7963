"""Quarantine: failures in a row, counted by row."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import GroupId
from asyncrl.protocols import End
from asyncrl.scheduling.quarantine import Quarantine


def end(row=17, state="failed", reason="too few scored: 0 of 8"):
    return End(GroupId(0, row, 0), state, reason)


def test_a_row_that_failed_often_enough_in_a_row_is_in_quarantine_and_the_reason_says_why():
    quarantine = Quarantine(3, failures={})
    assert [quarantine.note(end(reason=reason)) for reason in ("a", "b", "c", "d")] == [False, False, True, False]
    assert quarantine.reason(17) == "quarantined: row 17 failed 4 times, last: d"
    assert quarantine.reason(16) is None
    assert quarantine.reasons(17) == ["a", "b", "c", "d"]


def test_an_attempt_that_was_scored_begins_the_count_anew():
    quarantine = Quarantine(2, failures={})
    quarantine.note(end())
    for state in ("trained", "filtered", "expired"):
        quarantine.note(end(state=state, reason=""))
        assert not quarantine.note(end())
    assert quarantine.note(end())


def test_the_ends_of_quarantine_itself_and_innocent_ones_do_not_count():
    quarantine = Quarantine(1, failures={}, innocent=["training is over"])
    assert not quarantine.note(end(reason="training is over"))
    assert not quarantine.note(End(GroupId(0, 17, 0), "failed", "lost from the queue's journal", reissue=True))
    quarantine.note(end(reason="boom"))
    quarantine.note(end(reason=quarantine.reason(17)))
    assert quarantine.reason(17) == "quarantined: row 17 failed 1 times, last: boom"


def test_zero_switches_it_off():
    quarantine = Quarantine(0, failures={17: 5})
    assert not any(quarantine.note(end()) for _ in range(10))
    assert len(quarantine) == 0


def test_counts_of_an_earlier_life_go_on():
    quarantine = Quarantine(3, failures={17: 2, 18: 3})
    assert quarantine.rows == {18}
    assert quarantine.reason(18) == "quarantined: row 18 failed 3 times"
    quarantine.remember(18, ["boom"])
    assert quarantine.reason(18) == "quarantined: row 18 failed 3 times, last: boom"
    assert quarantine.note(end())


@given(
    ends=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["failed", "failed", "failed", "trained"])), max_size=40),
    after=st.integers(1, 4),
)
def test_rows_are_counted_apart_and_a_restart_in_between_changes_nothing(ends, after):
    whole, resumed, counts = Quarantine(after, failures={}), Quarantine(after, failures={}), {}
    for number, (row, state) in enumerate(ends):
        counts[row] = counts.get(row, 0) + 1 if state == "failed" else 0
        assert whole.note(end(row, state)) == (counts[row] == after)
        resumed.note(end(row, state))
        if number % 5 == 4:
            resumed = Quarantine(after, failures=counts)
        assert resumed.rows == whole.rows == {row for row, count in counts.items() if count >= after}
