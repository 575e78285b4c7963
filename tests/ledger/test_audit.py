"""The audit is clean on every healthy ledger, and names whatever somebody broke."""

from __future__ import annotations

import json
import shutil
import sqlite3
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import DeadlineExceeded, LedgerError
from asyncrl.ledger.audit import audit
from asyncrl.ledger.record import FILE_NAME, QueueHead
from asyncrl.messages import GroupId
from asyncrl.protocols.journal import JournalEntry, Place

TABLES = ("transitions", "reissues", "steps", "training_end", "starts", "cursor", "queue", "tally")
random_runs = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Witness:
    """What the parts of a live run say; `attempts` speaks for them unless they are overruled."""

    def __init__(self, attempts, *, in_flight=None, queued=None):
        self._attempts, self._in_flight, self._queued = attempts, in_flight, queued
        self.asked = 0

    def in_flight(self):
        self.asked += 1
        return self._of("in_flight") if self._in_flight is None else self._in_flight(self._of("in_flight"))

    def queued(self):
        return self._of("queued") if self._queued is None else self._queued(self._of("queued"))

    def _of(self, state):
        return [group.id for group in self._attempts.live() if group.state == state]


def audit_at_once(run_dir, ask=None):
    """Without waiting: time passes a second a look."""
    ticks = count()
    return audit(run_dir, ask, now=lambda: float(next(ticks)), sleep=lambda seconds: None)


def subjects(report):
    return {finding.subject for finding in report.findings}


def change_file(run_dir, *statements):
    file = sqlite3.connect(run_dir / FILE_NAME)
    with file:
        for statement in statements:
            file.execute(*statement)
    file.close()


@random_runs
@given(seed=st.integers(0, 2**32))
def test_a_healthy_ledger_is_clean_after_every_move_whether_the_run_lives_or_died(small_run, seed):
    run = small_run(seed)
    for _ in range(25):
        run.act()
        dead, live = audit_at_once(run.run_dir), audit_at_once(run.run_dir, Witness(run.attempts))
        for report in (dead, live):
            assert report.ok, report.to_text()
            assert report.balanced
        assert live.counts == run.attempts.counts()
        assert live.reasons == run.attempts.reasons
        assert dead.counts["in_flight"] == len(run.attempts.live())


@random_runs
@given(seed=st.integers(0, 2**32), change=st.sampled_from(["delete", "double"]), finished=st.booleans())
def test_any_row_that_is_deleted_or_doubled_is_named(small_run, seed, change, finished):
    run = small_run(seed, moves=18)
    if finished:
        run.finish_training()
    run.writer.close()
    for table in TABLES:
        file = sqlite3.connect(run.run_dir / FILE_NAME)
        rows = file.execute(f"SELECT rowid, * FROM {table}").fetchall()
        file.close()
        for rowid, *values in rows:
            broken = run.run_dir.with_name("broken")
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(run.run_dir, broken)
            if change == "delete":
                change_file(broken, (f"DELETE FROM {table} WHERE rowid = ?", (rowid,)))
            else:
                change_file(broken, (f"INSERT INTO {table} SELECT * FROM {table} WHERE rowid = ?", (rowid,)))
            report = audit_at_once(broken)
            assert name_of(table, values) in subjects(report), f"{change} {table} {values}: {report.to_text()}"


def name_of(table, values):
    match table:
        case "transitions" | "reissues":
            return str(GroupId(*values[1:4]))
        case "steps":
            return f"step {values[0]}"
        case "cursor":
            return "prompt cursor"
        case "starts":
            return f"start {values[0]}"
        case "queue":
            return "queue"
        case "training_end":
            return "end of training"
    return f"tally of {values[0]}"


@pytest.fixture
def trained_run(small_run):
    """A run whose steps trained several groups, and whose cursor is not at the end of them."""
    for seed in count():
        run = small_run(seed, moves=40)
        if run.attempts.counts()["trained"] >= 3 and run.attempts.counts()["filtered"] >= 1 and run.live("queued"):
            return run
    return None


def batch_lines(run):
    return [json.loads(line) for line in (run.run_dir / "batches.jsonl").read_text().splitlines()]


def write_lines(run, lines):
    (run.run_dir / "batches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def with_groups(lines):
    return next(line for line in lines if line["groups"])


def test_an_id_that_batches_does_not_name_is_found_in_no_place(trained_run):
    lines = batch_lines(trained_run)
    lost = with_groups(lines)["groups"].pop()
    write_lines(trained_run, lines)
    report = audit_at_once(trained_run.run_dir)
    assert subjects(report) == {lost}
    assert "in no place" in report.findings[0].problem
    assert not report.balanced


@pytest.mark.parametrize("state", ["filtered", "queued", "never dispatched"])
def test_an_id_that_batches_names_beside_the_ledger_is_named(trained_run, state):
    extra = GroupId(5, 1000, 0)
    if state == "queued":
        extra = trained_run.live("queued")[0]
    elif state == "filtered":
        file = sqlite3.connect(trained_run.run_dir / FILE_NAME)
        extra = GroupId(*file.execute('SELECT epoch, "row", attempt FROM transitions WHERE state = ?', (state,)).fetchone())
        file.close()
    lines = batch_lines(trained_run)
    lines[0]["groups"].append(str(extra))
    write_lines(trained_run, lines)
    assert subjects(audit_at_once(trained_run.run_dir)) == {str(extra)}


def test_an_id_that_trained_twice_is_named(trained_run):
    lines = batch_lines(trained_run)
    twice = with_groups(lines)["groups"][0]
    lines[-1]["groups"].append(twice)
    write_lines(trained_run, lines)
    report = audit_at_once(trained_run.run_dir)
    assert subjects(report) == {twice}
    assert any("in 2 places: trained and trained" in finding.problem for finding in report.findings)


def test_a_step_that_batches_lacks_is_named_with_its_groups(trained_run):
    lines = batch_lines(trained_run)
    lost = with_groups(lines)
    lines.remove(lost)
    write_lines(trained_run, lines)
    assert subjects(audit_at_once(trained_run.run_dir)) == {f"step {lost['step']}", *lost["groups"]}


def test_a_step_that_stands_twice_in_batches_is_named(trained_run):
    lines = batch_lines(trained_run)
    write_lines(trained_run, [*lines, lines[0]])
    assert f"step {lines[0]['step']}" in subjects(audit_at_once(trained_run.run_dir))


def test_a_step_that_began_at_another_version_is_named(trained_run):
    lines = batch_lines(trained_run)
    lines[0]["version"] += 1
    write_lines(trained_run, lines)
    assert subjects(audit_at_once(trained_run.run_dir)) == {"step 1"}


def test_a_line_that_is_no_batch_is_named(trained_run):
    path = trained_run.run_dir / "batches.jsonl"
    path.write_text(path.read_text() + '{"step": "seven"}\n')
    number = len(batch_lines(trained_run))
    assert subjects(audit_at_once(trained_run.run_dir)) == {f"batches.jsonl line {number}"}


def test_a_step_that_the_ledger_did_not_finish_is_left_out_and_said_to_be(trained_run):
    step = trained_run.attempts.finished_steps + 1
    line = {"step": step, "version": step - 1, "groups": [str(trained_run.live("queued")[0])], "token_versions": None}
    write_lines(trained_run, [*batch_lines(trained_run), line])
    report = audit_at_once(trained_run.run_dir)
    assert report.ok, report.to_text()
    assert any(f"names step {step}, past the ledger's last step" in note for note in report.notes)


def test_a_line_that_was_being_written_is_left_out_and_said_to_be(trained_run):
    path = trained_run.run_dir / "batches.jsonl"
    path.write_text(path.read_text() + '{"step": 99, "ver')
    report = audit_at_once(trained_run.run_dir)
    assert report.ok, report.to_text()
    assert any("middle of a line" in note for note in report.notes)


def test_a_live_group_that_no_part_holds_is_named(trained_run):
    lost = trained_run.live("queued")[0]
    witness = Witness(trained_run.attempts, queued=lambda ids: [id for id in ids if id != lost])
    report = audit_at_once(trained_run.run_dir, witness)
    assert subjects(report) == {str(lost)}
    assert witness.asked > 2  # it asked again before it called the difference real


def test_a_group_that_two_parts_hold_is_named(trained_run):
    both = trained_run.live("queued")[0]
    witness = Witness(trained_run.attempts, in_flight=lambda ids: [*ids, both])
    assert subjects(audit_at_once(trained_run.run_dir, witness)) == {str(both)}


def test_a_group_that_a_part_holds_and_nobody_dispatched_is_named(trained_run):
    witness = Witness(trained_run.attempts, in_flight=lambda ids: [*ids, GroupId(9, 9, 9)])
    assert subjects(audit_at_once(trained_run.run_dir, witness)) == {"9/9/9"}


def test_what_passes_between_two_looks_is_no_difference(trained_run):
    looks = count()
    witness = Witness(trained_run.attempts, queued=lambda ids: ids[1:] if next(looks) == 0 else ids[:-1] if len(ids) > 1 else ids)
    report = audit_at_once(trained_run.run_dir, witness)
    assert report.ok, report.to_text()
    assert report.balanced


def test_a_run_that_does_not_answer_is_audited_as_a_dead_one(trained_run):
    def silent(ids):
        raise DeadlineExceeded("no answer")

    report = audit_at_once(trained_run.run_dir, Witness(trained_run.attempts, in_flight=silent))
    assert report.ok
    assert not report.live
    assert any("does not answer" in note for note in report.notes)


def test_a_run_that_has_finished_holds_nothing(small_run):
    run = small_run(3, moves=20)
    run.finish_training()
    report = audit_at_once(run.run_dir)
    assert report.ok, report.to_text()
    assert report.counts["in_flight"] == report.counts["queued"] == 0
    held = trained_id(run)
    assert subjects(audit_at_once(run.run_dir, Witness(run.attempts, queued=lambda ids: [held]))) == {str(held)}


def trained_id(run):
    return next(GroupId.parse(id) for line in batch_lines(run) for id in line["groups"])


def test_a_group_that_the_cursor_has_not_reached_is_named(trained_run):
    trained_run.writer.close()
    change_file(trained_run.run_dir, ("UPDATE cursor SET position = position - 1",))
    report = audit_at_once(trained_run.run_dir)
    assert len(report.findings) >= 1
    assert all(
        "prompt order up to the cursor" in finding.problem or "never dispatched" in finding.problem for finding in report.findings
    )


def test_the_report_is_plain_json_and_a_text_that_says_the_law(trained_run):
    report = audit_at_once(trained_run.run_dir)
    told = json.loads(json.dumps(report.to_json()))
    assert told["ok"]
    assert told["balanced"]
    assert told["counts"]["dispatched"] == trained_run.attempts.dispatched
    assert report.to_text().startswith(f"{trained_run.attempts.dispatched} dispatched = ")
    assert report.to_text().endswith("clean")


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="name the directory of a run"):
        audit(tmp_path)


def test_a_run_that_has_started_nothing_yet_is_clean(small_run):
    run = small_run(0)
    for ask in (None, Witness(run.attempts)):
        report = audit_at_once(run.run_dir, ask)
        assert report.ok, report.to_text()
        assert report.counts["dispatched"] == 0


# A dead run whose queue kept a journal


class Journalled:
    """A small run with a queue of durability process: what is queued has its scored group in the journal, what is in flight its
    first member."""

    def __init__(self, run, *, retains=False):
        self.run = run
        run.writer.keep_queue(QueueHead("process", retains))
        self.ids = [(group.id, group.state) for group in run.attempts.live()]
        self.add(*(str(id) if state == "queued" else str(id.member(0)) for id, state in self.ids))

    def add(self, *message_ids):
        first = max((entry.ticket for entry in self.run.writer.journal.entries()), default=0) + 1
        groups = ["/".join(message_id.split("/")[:3]) for message_id in message_ids]
        places = [Place(1, 0, 1, 0)] * len(groups)
        entries = zip(range(first, first + len(groups)), ["any"] * len(groups), message_ids, groups, places, strict=True)
        self.run.writer.journal.add([JournalEntry(*entry) for entry in entries])
        self.run.writer.flush()

    def remove(self, message_id):
        found = [entry.ticket for entry in self.run.writer.journal.entries() if entry.message_id == message_id]
        self.run.writer.journal.remove(found)
        self.run.writer.flush()

    def audit(self):
        return audit_at_once(self.run.run_dir)


@pytest.fixture
def journalled(trained_run):
    return Journalled(trained_run)


def one_of(journalled, state):
    return next(str(id) for id, found in journalled.ids if found == state)


def test_the_journal_stands_for_the_queue_of_a_dead_run(journalled):
    report = journalled.audit()
    assert report.ok, report.to_text()
    assert report.counts == journalled.run.attempts.counts()
    assert report.counts["queued"] > 0


def test_a_queued_group_that_the_journal_lost_is_named(journalled):
    lost = one_of(journalled, "queued")
    journalled.remove(lost)
    assert subjects(journalled.audit()) == {lost}


def test_a_scored_group_in_the_journal_that_the_ledger_has_in_flight_is_named(journalled):
    odd = one_of(journalled, "in_flight")
    journalled.add(odd)
    assert subjects(journalled.audit()) == {odd}


def test_an_ended_group_stays_in_the_journal_only_until_a_checkpoint_holds_it(journalled):
    ended = str(trained_id(journalled.run))
    journalled.add(ended)
    assert subjects(journalled.audit()) == {ended}
    journalled.run.writer.keep_queue(QueueHead("process", True))
    assert journalled.audit().ok


def test_members_of_a_group_that_is_scored_or_unknown_are_named(journalled):
    queued = one_of(journalled, "queued")
    journalled.add(f"{queued}/1", "9/9/9/0", "nonsense")
    assert subjects(journalled.audit()) == {queued, "9/9/9", "nonsense"}


def test_a_returned_group_is_in_flight_though_nobody_holds_it(trained_run):
    returned = trained_run.live("queued")[0]
    trained_run.writer.append(trained_run.attempts.take_back([returned], "set back"))
    trained_run.writer.flush()
    report = audit_at_once(trained_run.run_dir, Witness(trained_run.attempts))
    assert report.ok, report.to_text()
    assert report.counts == trained_run.attempts.counts()
    both = audit_at_once(trained_run.run_dir, Witness(trained_run.attempts, queued=lambda ids: [*ids, returned]))
    assert subjects(both) == {str(returned)}
