"""Going back to a checkpoint: what the trainer forgets, the ledger forgets, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import LedgerError
from asyncrl.ledger.record import QueueHead
from asyncrl.ledger.set_back import Held
from asyncrl.ledger.states import TRAINING_OVER
from asyncrl.ledger.store import FILE_NAME, LedgerWriter, read_ledger, replay, samples
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, PromptCursor, StepRecord
from tests.ledger.test_audit import Witness, audit_at_once

HEAD = QueueHead("process", True)
random_runs = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def id_of(row: int, attempt: int = 0) -> GroupId:
    return GroupId(0, row, attempt)


def held(*rows: int, members: dict[int, range] | None = None) -> Held:
    return Held(2, {id_of(row) for row in rows}, {id_of(row): some for row, some in (members or {}).items()})


class World:
    """A ledger after two steps: rows 0 and 1 trained in step 1; then 2 trained, 3 filtered, 4 non-finite in step 2; 5 expired and
    was issued again, 6 expired, 7 failed, all after step 1; 8 is queued, 9 in flight; 10 was drawn after step 1."""

    def __init__(self, folder):
        self.path = folder / FILE_NAME
        self.writer = LedgerWriter(self.path, wall=lambda: 1.0)
        self.writer.start(0, HEAD)
        made = self.writer.append
        attempts = self.writer.attempts
        made(attempts.dispatch([Dispatch(id_of(row), 0) for row in range(10)], self.cursor(10)))
        made(attempts.queue([id_of(row) for row in (*range(7), 8)]))
        made(attempts.finish_step(StepRecord(1, 0, (End(id_of(0), "trained"), End(id_of(1), "trained")), staleness_bound=2)))
        self.at_step_1 = samples(attempts)
        made(attempts.end([End(id_of(5), "expired", "stale", reissue=True), End(id_of(6), "expired", "stale")]))
        made(attempts.end([End(id_of(7), "failed", "too few scored: 1 of 2")]))
        made(attempts.dispatch([Dispatch(id_of(10), 1)], self.cursor(11)))
        ends = (End(id_of(2), "trained"), End(id_of(3), "filtered", "zero variance"), End(id_of(4), "failed", "non-finite loss"))
        made(attempts.finish_step(StepRecord(2, 1, ends, staleness_bound=3)))
        self.writer.flush()

    @staticmethod
    def cursor(position):
        return PromptCursor(0, position, None, 0, False)

    def states(self):
        attempts = self.writer.attempts
        return {row: attempts.state(id_of(row)) for row in range(11)}


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    assert samples(replay(read_ledger(made.path))) == samples(made.writer.attempts)
    made.writer.close()


def test_with_the_queue_kept_what_ended_after_the_checkpoint_is_queued_again(world):
    everything = range(11)
    world.writer.set_back(1, 1, HEAD, held(*everything, members={row: range(2) for row in everything}))
    states = world.states()
    assert [row for row in everything if states[row] == "queued"] == [2, 3, 4, 6, 8]
    assert [row for row in everything if states[row] == "in_flight"] == [9, 10]
    assert [row for row in everything if states[row] == "ended"] == [0, 1, 5, 7]  # 5: its successor carries the row
    attempts = world.writer.attempts
    assert (attempts.finished_steps, attempts.cursor) == (1, world.cursor(11))
    assert attempts.owed() == [id_of(5, 1)]
    assert attempts.reasons == {"expired: stale": 1, "failed: too few scored": 1}


def test_with_the_queue_kept_what_it_lost_is_returned(world):
    world.writer.set_back(1, 1, HEAD, held(2, 3, members={9: range(2), 10: range(1)}))
    states = world.states()
    assert [row for row in range(11) if states[row] == "returned"] == [4, 6, 8, 10]
    assert [row for row in range(11) if states[row] == "in_flight"] == [9]


def test_without_the_queue_the_ledger_is_what_it_was_and_everything_live_is_returned(world):
    world.writer.set_back(1, 1, QueueHead("none", False), None)
    attempts = world.writer.attempts
    assert {**samples(attempts), "queued": 0, "in_flight": 0} == {**world.at_step_1, "queued": 0, "in_flight": 0}
    assert attempts.returned() == [id_of(row) for row in range(2, 10)]
    assert (attempts.cursor, attempts.owed()) == (world.cursor(10), [])
    assert attempts.state(id_of(10)) == "unknown"


@pytest.mark.parametrize(("step", "bound"), [(2, 3), (1, 2), (0, None)])
def test_the_staleness_bound_is_what_it_was(world, step, bound):
    assert replay(read_ledger(world.path)).staleness_bound == 3
    world.writer.set_back(step, 1, HEAD, held())
    assert world.writer.attempts.staleness_bound == bound


def test_back_to_the_beginning(world):
    world.writer.set_back(0, 1, QueueHead("none", False), None)
    attempts = world.writer.attempts
    assert attempts.dispatched == attempts.finished_steps == 0
    assert attempts.cursor == world.cursor(0)
    world.writer.append(attempts.dispatch([Dispatch(id_of(0), 0)], world.cursor(1)))
    world.writer.flush()


def test_the_end_of_training_is_undone_and_what_it_ended(world):
    attempts = world.writer.attempts
    world.writer.append(attempts.finish_training(2))
    assert attempts.reasons[f"failed: {TRAINING_OVER}"] == 3
    everything = range(11)
    world.writer.set_back(2, 1, HEAD, held(*everything, members={row: range(2) for row in everything}))
    attempts = world.writer.attempts
    assert (attempts.final_version, attempts.finished_steps) == (None, 2)
    assert [group.id.row for group in attempts.live()] == [6, 8, 9, 10] or [group.id.row for group in attempts.live()] == [
        8,
        9,
        10,
    ]
    assert f"failed: {TRAINING_OVER}" not in attempts.reasons


def test_a_step_that_was_never_finished_is_refused(world):
    with pytest.raises(LedgerError, match="cannot be set back to step 3, it finished 2"):
        world.writer.set_back(3, 1, HEAD, held())


def test_starts_are_remembered_and_numbers_go_on(world):
    before = read_ledger(world.path).transitions[-1].seq
    world.writer.set_back(1, 4, HEAD, held())
    record = read_ledger(world.path)
    assert [(row.incarnation, row.step, row.mode, row.seq) for row in record.starts] == [
        (0, 0, "fresh", 0),
        (4, 1, "kept", before),
    ]
    numbers = [row.seq for row in record.transitions]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] > before
    assert world.writer.last_start == record.starts[-1]


def everything_of(attempts):
    what = samples(attempts), attempts.live(), attempts.returned(), attempts.owed(), attempts.cursor, attempts.failures_by_row
    return what, attempts.finished_steps, attempts.final_version, attempts.seq, attempts.events(0)


@random_runs
@given(seed=st.integers(0, 2**32), keep=st.booleans())
def test_whatever_is_lost_and_set_back_the_law_holds_and_the_file_leads_to_the_same_states(small_run, seed, keep):
    run = small_run(seed, restarts=True, keep=keep)
    for _ in range(30):
        run.act()
        report = audit_at_once(run.run_dir, Witness(run.attempts))
        assert report.ok, report.to_text()
        assert report.balanced
        assert report.counts == run.attempts.counts()
        again = replay(read_ledger(run.run_dir / FILE_NAME))
        assert samples(again) == samples(run.attempts)
        assert (again.live(), again.returned(), again.owed()) == (
            run.attempts.live(),
            run.attempts.returned(),
            run.attempts.owed(),
        )
        assert (again.seq, again.cursor, again.finished_steps) == (
            run.attempts.seq,
            run.attempts.cursor,
            run.attempts.finished_steps,
        )
        assert again.events(0) == run.attempts.events(0)
        assert again.failures_by_row == run.attempts.failures_by_row


@random_runs
@given(seed=st.integers(0, 2**32), keep=st.booleans())
def test_setting_back_forgets_exactly_what_the_trainer_forgot(small_run, seed, keep):
    """No step after s stays, none before goes; with the queue kept no dispatch goes; a row is never live under two attempts."""
    run = small_run(seed, moves=40, restarts=True, keep=keep)
    before, step = run.record(), run.random.randint(0, run.attempts.finished_steps)
    run.go_back(step, Held(2) if keep else None)
    after = run.record()
    assert [row.step for row in after.steps] == list(range(1, step + 1))
    assert list(after.steps) == [row for row in before.steps if row.step <= step]
    trained = {row.id for row in after.transitions if row.state == "trained"}
    assert trained == {row.id for row in before.transitions if row.state == "trained" and row.step <= step}
    dispatched = [row.id for row in after.transitions if row.state == "dispatched"]
    if keep:
        assert dispatched == [row.id for row in before.transitions if row.state == "dispatched"]
    live = [(id.epoch, id.row) for id in (*(group.id for group in run.attempts.live()), *run.attempts.returned())]
    carried = live + [(id.epoch, id.row) for id in (*run.attempts.owed(), *trained)]
    assert len(carried) == len(set(carried))
