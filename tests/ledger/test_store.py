"""The ledger's file holds what happened, and leads back to the same states."""

import shutil
import sqlite3
import time

import pytest

from asyncrl.errors import LedgerCorrupt, LedgerError
from asyncrl.ledger.store import FILE_NAME, LedgerWriter, read_ledger, read_samples, replay, samples
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, PromptCursor, StepRecord


@pytest.mark.parametrize("seed", range(8))
def test_a_reopened_ledger_stands_where_it_stood_and_goes_on(small_run, seed):
    run = small_run(seed, moves=40)
    run.writer.close()
    reopened = LedgerWriter(run.run_dir / FILE_NAME)
    assert reopened.attempts.live() == run.attempts.live()
    assert samples(reopened.attempts) == samples(run.attempts)
    assert reopened.attempts.owed() == run.attempts.owed()
    assert reopened.attempts.cursor == run.attempts.cursor
    assert reopened.attempts.finished_steps == run.attempts.finished_steps
    assert reopened.attempts.seq == run.attempts.seq
    run.writer, run.attempts = reopened, reopened.attempts
    run.play(10)
    assert samples(replay(read_ledger(run.run_dir / FILE_NAME))) == samples(run.attempts)


def test_a_reader_sees_a_live_ledger_as_of_its_last_transaction(small_run):
    run = small_run(1, moves=30)
    told = read_samples(run.run_dir)
    run.dispatch()
    assert read_samples(run.run_dir) == told
    run.writer.flush()
    assert read_samples(run.run_dir) == samples(run.attempts)


def test_what_was_synced_needs_no_log_of_the_database_that_a_power_cut_may_take(small_run, tmp_path):
    run = small_run(1, moves=30)
    run.writer.sync()
    shutil.copyfile(run.run_dir / FILE_NAME, tmp_path / FILE_NAME)
    assert read_ledger(tmp_path / FILE_NAME) == read_ledger(run.run_dir / FILE_NAME)
    run.dispatch()
    run.writer.flush()
    shutil.copyfile(run.run_dir / FILE_NAME, tmp_path / "unsynced")
    assert read_ledger(tmp_path / "unsynced") == read_ledger(tmp_path / FILE_NAME), "else this test shows nothing"


def test_a_finished_run_is_read_from_a_directory_that_cannot_be_written(small_run):
    run = small_run(1, moves=30)
    run.writer.close()
    (run.run_dir).chmod(0o500)
    try:
        assert read_samples(run.run_dir) == samples(run.attempts)
    finally:
        run.run_dir.chmod(0o700)


def test_a_directory_without_a_ledger_is_named(tmp_path):
    with pytest.raises(LedgerError, match="there is no ledger"):
        read_samples(tmp_path)


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text("something else " * 100)
    with pytest.raises(LedgerCorrupt, match="cannot be read"):
        read_ledger(path)
    with pytest.raises(LedgerCorrupt):
        LedgerWriter(path)


def test_a_ledger_of_another_format_is_refused(small_run):
    run = small_run(1, moves=5)
    run.writer.close()
    with sqlite3.connect(run.run_dir / FILE_NAME) as file:
        file.execute("PRAGMA user_version = 99")
    file.close()
    with pytest.raises(LedgerCorrupt, match="format 99"):
        read_ledger(run.run_dir / FILE_NAME)


def test_a_ledger_with_a_missing_row_is_not_gone_on_with(small_run):
    run = small_run(1, moves=30)
    run.writer.close()
    with sqlite3.connect(run.run_dir / FILE_NAME) as file:
        file.execute("DELETE FROM transitions WHERE rowid = (SELECT max(rowid) FROM transitions)")
    file.close()
    with pytest.raises(LedgerCorrupt, match="asyncrl audit"):
        LedgerWriter(run.run_dir / FILE_NAME)


def test_several_thousand_transitions_a_second_cost_little(tmp_path):
    """A group's three transitions, a transaction for every 16 groups: the pipeline as a whole has 4 ms of CPU for a group."""
    writer = LedgerWriter(tmp_path / FILE_NAME)
    groups = 4800
    before = time.process_time()
    for step in range(1, groups // 16 + 1):
        ids = [GroupId(0, row, 0) for row in range(step * 16 - 16, step * 16)]
        for id in ids:
            writer.append(writer.attempts.dispatch([Dispatch(id, step)], PromptCursor(0, id.row + 1, None, 0, False)))
        writer.append(writer.attempts.queue(ids))
        writer.append(writer.attempts.finish_step(StepRecord(step, step, tuple(End(id, "trained") for id in ids))))
        writer.flush()
    seconds = time.process_time() - before
    writer.close()
    assert seconds / groups < 0.5e-3, f"{seconds / groups * 1e6:.0f} µs a group"
