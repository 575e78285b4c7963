"""Segment files and the journal over them: order, places, what a disk may do, and what is synced before what."""

from __future__ import annotations

import os

import pytest

from asyncrl.ledger.store import FILE_NAME, LedgerWriter
from asyncrl.protocols.journal import Place
from asyncrl.transport.exchange import Exchange, NoHooks
from asyncrl.transport.journal import SegmentJournal, segments
from asyncrl.transport.journal.segments import HEADER_BYTES, Segments, WrongRecord
from asyncrl.transport.records import Incoming
from tests.transport.queues import topic


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


def test_what_is_appended_is_read_back_whatever_its_size(folder):
    files = Segments(folder, power=False, segment_bytes=1000)
    payloads = [os.urandom(size) for size in (0, 1, 900, 5000, 10, 10, 2000, 0)]
    places = files.append(payloads) + files.append([memoryview(payload) for payload in payloads])
    assert [files.read(place) for place in places] == payloads * 2
    assert len({place.segment for place in places}) > 4
    assert files.num_bytes() == sum(HEADER_BYTES + len(payload) for payload in payloads) * 2
    files.close()


def test_more_payloads_than_one_write_takes(folder):
    files = Segments(folder, power=False)
    payloads = [str(number).encode() for number in range(3000)]
    assert [files.read(place) for place in files.append(payloads)] == payloads
    files.close()


def test_a_short_write_is_gone_on_with(folder, monkeypatch):
    real = os.writev
    monkeypatch.setattr(segments.os, "writev", lambda descriptor, buffers: real(descriptor, [b"".join(buffers)[:7]]))
    files = Segments(folder, power=False)
    assert [files.read(place) for place in files.append([b"first", b"second"])] == [b"first", b"second"]
    files.close()


def test_a_file_that_was_found_is_never_appended_to(folder):
    first = Segments(folder, power=False)
    place = first.append([b"x"])[0]
    first.close()
    with (folder / "00000001.segment").open("ab") as file:
        file.write(b"torn")
    second = Segments(folder, power=False)
    assert second.append([b"y"])[0].segment == 2
    assert second.read(place) == b"x"
    second.close()


def test_every_place_that_holds_another_record_is_wrong(folder):
    files = Segments(folder, power=False)
    places = files.append([b"one", b"two", b"three"])
    one, two, _ = places
    wrong = [
        (Place(one.segment, one.offset, one.size, two.checksum), "another record"),
        (Place(one.segment, one.offset + 1, one.size, one.checksum), "another record"),
        (Place(one.segment, one.offset, 4, one.checksum), "another record"),
        (Place(one.segment, places[2].offset, 10_000, 0), "too early"),
        (Place(7, 0, 3, 0), "is gone"),
    ]
    for place, problem in wrong:
        with pytest.raises(WrongRecord, match=problem):
            files.read(place)
    files.close()


def test_files_open_at_one_time_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(segments, "_OPEN", 8)
    files = Segments(folder, power=False, segment_bytes=1)
    places = [files.append([bytes([number])])[0] for number in range(50)]
    for place in (*places, *reversed(places)):
        files.read(place)
    assert len(files._descriptors) <= 8
    files.close()


class Watched(LedgerWriter):
    """Says when its transaction is made."""

    def flush(self):
        if self.dirty:
            self.seen.append("rows")
        super().flush()


class Site(NoHooks):
    """An exchange with a journal in the ledger's file; `seen` is what reached the disk, in order."""

    def __init__(self, tmp_path, monkeypatch, *, power: bool):
        self.seen = []
        data, whole = os.fdatasync, os.fsync
        monkeypatch.setattr(segments.os, "fdatasync", lambda descriptor: (self.seen.append("payloads"), data(descriptor)))
        monkeypatch.setattr(segments.os, "fsync", lambda descriptor: (self.seen.append("folder"), whole(descriptor)))
        self.writer = Watched(tmp_path / FILE_NAME, power=power)
        self.writer.seen = self.seen
        self.journal = SegmentJournal(Segments(tmp_path / "journal", power=power), self.writer.journal)
        self.journal.open()
        self.exchange = Exchange([topic()], lease_seconds=30, hooks=self, journal=self.journal)
        self.exchange.topic("rollouts").open_sender(b"s", "rollouter", 0.0)
        self.number = 0

    def commit(self):
        self.writer.flush()

    def send(self, *message_ids):
        of = self.exchange.topic("rollouts")
        of.announce(b"s", self.number, [1] * len(message_ids), 0.0)
        of.grant(0.0)
        self.exchange.accept("rollouts", b"s", self.number, [Incoming(each, "g", b"x") for each in message_ids], 0.0)
        self.number += len(message_ids)
        self.exchange.publish()

    def close(self):
        self.journal.close()
        self.writer.close()


def test_under_power_payloads_and_folder_are_synced_before_the_rows_that_name_them(tmp_path, monkeypatch):
    site = Site(tmp_path, monkeypatch, power=True)
    site.send("a", "b")
    assert site.seen == ["payloads", "folder", "rows"]
    site.send("c")
    assert site.seen[3:] == ["payloads", "rows"]
    site.exchange.settle("rollouts", ["a"])
    site.exchange.publish()
    assert site.seen[5:] == ["rows"]
    assert site.writer._file.execute("PRAGMA synchronous").fetchone() == (2,)
    site.close()


def test_under_process_nothing_is_synced(tmp_path, monkeypatch):
    site = Site(tmp_path, monkeypatch, power=False)
    site.send("a", "b")
    assert site.seen == ["rows"]
    assert site.writer._file.execute("PRAGMA synchronous").fetchone() == (1,)
    site.close()


def test_a_wake_up_that_changes_nothing_writes_nothing(tmp_path, monkeypatch):
    site = Site(tmp_path, monkeypatch, power=True)
    site.send("a")
    before = list(site.seen)
    site.exchange.publish()
    site.exchange.take("rollouts", b"c", max_items=9, max_bytes=100, now=0.0)
    site.exchange.publish()
    assert site.seen == before
    site.close()


def test_what_is_accepted_and_settled_in_one_wake_up_never_reaches_the_disk(tmp_path, monkeypatch):
    site = Site(tmp_path, monkeypatch, power=False)
    site.on_accept = lambda topic, accepted: site.exchange.settle(topic, ["a"])
    site.send("a", "b")
    assert [entry.message_id for entry in site.writer.journal.entries()] == ["b"]
    assert site.journal.segments.num_bytes() == HEADER_BYTES + 1
    site.close()


def test_an_empty_journal_takes_no_more_than_its_last_file(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 50)
    site = Site(tmp_path, monkeypatch, power=False)
    for number in range(200):
        site.send(str(number))
        site.exchange.settle("rollouts", [str(number)])
        site.exchange.publish()
    assert site.journal.segments.num_bytes() <= 4 * 50
    assert len(list((tmp_path / "journal").iterdir())) <= 4
    site.close()
