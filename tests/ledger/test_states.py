"""The state machine refuses what would unbalance the ledger, and then nothing has changed."""

import pytest

from asyncrl.errors import IllegalTransition, LedgerError
from asyncrl.ledger import states
from asyncrl.ledger.states import TRAINING_OVER, Attempts
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, PromptCursor, StepRecord


def id_of(row: int, attempt: int = 0) -> GroupId:
    return GroupId(0, row, attempt)


def cursor(position: int) -> PromptCursor:
    return PromptCursor(0, position, None, 0, False)


def started(*rows: int, version: int = 0) -> Attempts:
    attempts = Attempts()
    attempts.dispatch([Dispatch(id_of(row), version) for row in rows], cursor(len(rows)))
    return attempts


def queued(*rows: int) -> Attempts:
    attempts = started(*rows)
    attempts.queue([id_of(row) for row in rows])
    return attempts


def refused(attempts: Attempts, change, match: str) -> None:
    before = (attempts.counts(), attempts.live(), attempts.seq, attempts.owed(), attempts.finished_steps)
    with pytest.raises(IllegalTransition, match=match):
        change()
    assert before == (attempts.counts(), attempts.live(), attempts.seq, attempts.owed(), attempts.finished_steps)


def test_a_group_goes_from_dispatch_to_training_and_is_counted_once_at_every_moment():
    attempts = started(4)
    assert attempts.counts()["in_flight"] == 1
    attempts.queue([id_of(4)])
    assert (attempts.counts()["in_flight"], attempts.counts()["queued"]) == (0, 1)
    attempts.finish_step(StepRecord(1, 0, (End(id_of(4), "trained"),)))
    assert attempts.counts() == {
        "dispatched": 1, "trained": 1, "filtered": 0, "failed": 0, "expired": 0, "in_flight": 0, "queued": 0,
    }  # fmt: skip


def test_an_attempt_starts_once():
    attempts = started(1)
    refused(attempts, lambda: attempts.dispatch([Dispatch(id_of(2), 0), Dispatch(id_of(1), 0)], cursor(3)), "dispatched before")
    refused(attempts, lambda: attempts.dispatch([Dispatch(id_of(2), 0), Dispatch(id_of(2), 0)], cursor(3)), "dispatched before")
    attempts.end([End(id_of(1), "failed", "lost")])
    refused(attempts, lambda: attempts.dispatch([Dispatch(id_of(1), 0)], cursor(3)), "dispatched before")
    live = started(1)
    refused(live, lambda: live.dispatch([Dispatch(id_of(1), 5)], cursor(1)), "dispatched before")


def test_a_later_attempt_starts_only_when_it_was_asked_for_and_only_once():
    attempts = started(1)
    refused(attempts, lambda: attempts.dispatch([Dispatch(id_of(1, 1), 0)], cursor(1)), "nobody asked for")
    attempts.end([End(id_of(1), "expired", "stale", reissue=True)])
    assert attempts.owed() == [id_of(1, 1)]
    attempts.dispatch([Dispatch(id_of(1, 1), 3)], cursor(1))
    assert attempts.owed() == []
    refused(attempts, lambda: attempts.dispatch([Dispatch(id_of(1, 1), 4)], cursor(1)), "dispatched before")


def test_an_attempt_ends_once():
    attempts = queued(1)
    attempts.finish_step(StepRecord(1, 0, (End(id_of(1), "trained"),)))
    refused(attempts, lambda: attempts.end([End(id_of(1), "failed")]), "it is ended")
    refused(attempts, lambda: attempts.finish_step(StepRecord(2, 0, (End(id_of(1), "trained"),))), "it is ended")
    refused(attempts, lambda: attempts.queue([id_of(1)]), "it is ended")


def test_one_call_that_ends_a_group_twice_changes_nothing():
    attempts = queued(1, 2)
    ends = (End(id_of(2), "trained"), End(id_of(1), "trained"), End(id_of(1), "filtered"))
    refused(attempts, lambda: attempts.finish_step(StepRecord(1, 0, ends)), "twice")
    refused(attempts, lambda: attempts.queue([id_of(1)]), "it is queued")


def test_what_was_not_queued_neither_trains_nor_is_filtered():
    attempts = started(1)
    for state in ("trained", "filtered"):
        record = StepRecord(1, 0, (End(id_of(1), state),))
        refused(attempts, lambda record=record: attempts.finish_step(record), "it is in flight")


def test_nothing_trains_outside_a_step():
    attempts = queued(1)
    refused(attempts, lambda: attempts.end([End(id_of(1), "trained")]), "outside a step")


def test_what_was_never_dispatched_is_unknown():
    attempts = started(1)
    refused(attempts, lambda: attempts.queue([id_of(9)]), "it is unknown")
    refused(attempts, lambda: attempts.end([End(id_of(9), "failed")]), "it is unknown")


def test_steps_finish_in_order_each_once():
    attempts = started(1)
    refused(attempts, lambda: attempts.finish_step(StepRecord(2, 0, ())), "0 steps are finished")
    attempts.finish_step(StepRecord(1, 0, ()))
    refused(attempts, lambda: attempts.finish_step(StepRecord(1, 1, ())), "1 steps are finished")
    refused(attempts, lambda: attempts.finish_step(StepRecord(1, 0, (End(id_of(1), "failed"),))), "1 steps are finished")


def test_when_training_is_over_nothing_is_live_and_nothing_stays_live():
    attempts = queued(1, 2)
    attempts.finish_training(7)
    assert attempts.live() == []
    attempts.dispatch([Dispatch(id_of(3), 7)], cursor(3))
    assert attempts.counts()["failed"] == 3
    assert attempts.reasons == {f"failed: {TRAINING_OVER}": 3}
    attempts.end([End(id_of(1), "failed", "too few scored: 0 of 8")])  # its holder could not know
    assert attempts.counts()["failed"] == 3
    refused(attempts, lambda: attempts.finish_step(StepRecord(1, 0, ())), "training is over")
    refused(attempts, lambda: attempts.finish_training(8), "over already")


def test_live_groups_come_oldest_dispatch_first_with_their_start_version():
    attempts = started(5, 3, version=2)
    attempts.queue([id_of(5)])
    assert [(group.id.row, group.start_version, group.state) for group in attempts.live()] == [
        (5, 2, "queued"),
        (3, 2, "in_flight"),
    ]


def test_events_are_given_after_the_number_that_was_seen():
    attempts = queued(1, 2)
    attempts.end([End(id_of(1), "expired", "stale", reissue=True)])
    first = attempts.events(0)
    assert first.ended == (End(id_of(1), "expired", "stale", reissue=True),)
    attempts.finish_step(StepRecord(1, 0, (End(id_of(2), "trained"),)))
    second = attempts.events(first.seq)
    assert (second.ended, second.finished_steps) == ((End(id_of(2), "trained"),), 1)
    attempts.finish_training(1)
    third = attempts.events(second.seq)
    assert (third.ended, third.training_done, third.final_version) == ((), True, 1)


def test_old_events_are_forgotten_and_said_to_be(monkeypatch):
    monkeypatch.setattr(states, "EVENTS_KEPT", 3)
    attempts = queued(*range(5))
    attempts.end([End(id_of(row), "failed") for row in range(5)])
    assert [end.id.row for end in attempts.events(2).ended] == [2, 3, 4]
    with pytest.raises(LedgerError, match=r"begin with live"):
        attempts.events(1)


def test_reasons_are_counted_by_their_head():
    attempts = started(1, 2, 3)
    attempts.end([End(id_of(1), "failed", "too few scored: 0 of 8"), End(id_of(2), "failed", "too few scored: 1 of 8")])
    attempts.end([End(id_of(3), "expired")])
    assert attempts.reasons == {"failed: too few scored": 2, "expired": 1}


def test_memory_does_not_grow_with_what_has_ended():
    attempts = Attempts()
    for row in range(20_000):
        attempts.dispatch([Dispatch(id_of(row), 0)], cursor(row + 1))
        attempts.end([End(id_of(row), "failed")])
    assert attempts.live() == []
    assert sum(map(len, attempts._seen._blocks.values())) <= 20_000 // 8 + 512
    assert attempts.state(id_of(19_999)) == "ended"
    assert attempts.state(id_of(20_000)) == "unknown"


def unchanged_by(attempts: Attempts, change) -> None:
    before = (attempts.counts(), attempts.live(), attempts.seq, attempts.owed(), attempts.finished_steps, attempts.cursor)
    assert not change()
    assert before == (
        attempts.counts(), attempts.live(), attempts.seq, attempts.owed(), attempts.finished_steps, attempts.cursor,
    )  # fmt: skip


def test_what_already_stands_may_be_said_again():
    attempts = started(1, 2, 3, version=4)
    attempts.dispatch([Dispatch(id_of(9), 4)], cursor(7))
    unchanged_by(attempts, lambda: attempts.dispatch([Dispatch(id_of(row), 4) for row in (1, 2, 3)], cursor(3)))
    attempts.queue([id_of(1), id_of(2)])
    unchanged_by(attempts, lambda: attempts.dispatch([Dispatch(id_of(row), 4) for row in (1, 2, 3)], cursor(3)))
    attempts.end([End(id_of(1), "expired", "stale", reissue=True)])
    unchanged_by(attempts, lambda: attempts.end([End(id_of(1), "expired", "stale", reissue=True)]))
    refused(attempts, lambda: attempts.end([End(id_of(1), "failed", "stale")]), "it is ended")
    record = StepRecord(1, 0, (End(id_of(2), "trained"),))
    attempts.finish_step(record)
    unchanged_by(attempts, lambda: attempts.finish_step(record))
    attempts.finish_training(5)
    unchanged_by(attempts, lambda: attempts.finish_training(5))
    unchanged_by(attempts, lambda: attempts.finish_step(record))
    attempts.dispatch([Dispatch(id_of(12), 5)], cursor(8))
    unchanged_by(attempts, lambda: attempts.dispatch([Dispatch(id_of(12), 5)], cursor(8)))


def test_an_attempt_whose_data_is_lost_is_generated_again_as_the_same_attempt():
    attempts = queued(1)
    attempts.take_back([id_of(1)], "set back")
    assert (attempts.live(), attempts.returned()) == ([], [id_of(1)])
    assert attempts.counts()["in_flight"] == 1
    refused(attempts, lambda: attempts.dispatch([Dispatch(id_of(1), 0)], cursor(1)), "dispatched before")
    refused(attempts, lambda: attempts.finish_step(StepRecord(1, 0, (End(id_of(1), "trained"),))), "it is returned")
    attempts.restart([Dispatch(id_of(1), 6)])
    assert [(group.start_version, group.state) for group in attempts.live()] == [(6, "in_flight")]
    attempts.queue([id_of(1)])
    attempts.finish_step(StepRecord(1, 6, (End(id_of(1), "trained"),)))
    assert attempts.counts()["trained"] == attempts.dispatched == 1


def test_what_has_moved_on_is_passed_over_by_a_restart_and_the_unknown_is_refused():
    attempts = queued(1, 2, 3)
    attempts.take_back([id_of(1)], "lost")
    attempts.end([End(id_of(2), "expired", "stale")])
    changes = attempts.restart([Dispatch(id_of(row), 3) for row in (1, 2, 3)])
    assert [transition.id for transition in changes.transitions] == [id_of(1)]
    unchanged_by(attempts, lambda: attempts.restart([Dispatch(id_of(1), 3)]))
    refused(attempts, lambda: attempts.restart([Dispatch(id_of(8), 3)]), "never dispatched")


def test_a_returned_attempt_may_end_and_nothing_stays_of_it():
    attempts = queued(1, 2)
    attempts.take_back([id_of(1), id_of(2)], "lost")
    attempts.end([End(id_of(1), "failed", "its row failed three times")])
    attempts.finish_training(0)
    assert attempts.returned() == []
    assert attempts.counts()["failed"] == 2


def test_failures_are_counted_by_row_when_they_are_the_rows_own():
    attempts = queued(1, 2, 3, 4)
    attempts.end([End(id_of(1), "failed", "too few scored", reissue=True), End(id_of(2), "expired", "stale")])
    attempts.dispatch([Dispatch(id_of(1, 1), 0)], cursor(4))
    attempts.end([End(id_of(1, 1), "failed", "too few scored")])
    attempts.finish_step(StepRecord(1, 0, (End(id_of(3), "failed", "non-finite loss"),)))
    attempts.finish_training(0)
    assert attempts.failures_by_row == {1: 2}


def test_an_attempt_that_was_scored_begins_its_rows_count_of_failures_anew():
    attempts = queued(1, 2)
    attempts.end([End(id_of(1), "failed", "too few scored", reissue=True), End(id_of(2), "failed", "too few scored")])
    attempts.dispatch([Dispatch(id_of(1, 1), 0)], cursor(2))
    attempts.queue([id_of(1, 1)])
    attempts.finish_step(StepRecord(1, 0, (End(id_of(1, 1), "trained"),)))
    assert attempts.failures_by_row == {2: 1}
