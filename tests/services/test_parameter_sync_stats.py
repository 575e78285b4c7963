"""Figures of the updates, which outlive the process that counts them."""

from __future__ import annotations

import logging

from asyncrl.protocols.weights import PolicyVersion
from asyncrl.services.parameter_sync.stats import SyncStats

A = "inference/0"


def bring(stats: SyncStats, incarnation: int, version: int) -> None:
    stats.published(PolicyVersion(incarnation, version))
    stats.confirmed(PolicyVersion(incarnation, version), server=A, pause_ms=1.5, transfer_ms=20.0, bytes=1000)


def test_figures_go_on_in_a_new_process(tmp_path):
    stats = SyncStats(tmp_path / "sync.jsonl")
    for version in range(3):
        bring(stats, 1, version)
    stats.published(PolicyVersion(1, 3))
    stats.refused(PolicyVersion(1, 3), server=A, slices=2)
    stats.failed(PolicyVersion(1, 3), server=A, reason="late")
    again = SyncStats(tmp_path / "sync.jsonl")
    assert again.summary() == stats.summary()
    again.published(PolicyVersion(1, 3))
    again.adopted(PolicyVersion(1, 3), server=A, verified=True)
    summary = again.summary()
    assert (summary["count"], summary["skipped"], summary["bytes"], summary["verified"]) == (3, 0, 2000, True)
    assert (summary["refused_slices"], summary["failed_updates"]) == (2, 1)


def test_what_was_live_unverified_stays_so_whoever_counts_next(tmp_path):
    stats = SyncStats(tmp_path / "sync.jsonl")
    bring(stats, 1, 0)
    stats.unverified(PolicyVersion(1, 1), server=A)
    again = SyncStats(tmp_path / "sync.jsonl")
    bring(again, 1, 1)
    assert again.summary()["verified"] is False


def test_a_torn_last_line_costs_itself_alone(tmp_path):
    stats = SyncStats(tmp_path / "sync.jsonl")
    for version in range(2):
        bring(stats, 1, version)
    with (tmp_path / "sync.jsonl").open("ab") as file:
        file.write(b'{"event": "confir')
    again = SyncStats(tmp_path / "sync.jsonl")
    bring(again, 1, 2)
    assert SyncStats(tmp_path / "sync.jsonl").summary()["count"] == 2


def test_a_disk_that_takes_nothing_costs_the_record_and_not_the_run(tmp_path, caplog):
    stats = SyncStats(tmp_path / "absent" / "sync.jsonl")
    with caplog.at_level(logging.ERROR):
        for version in range(3):
            bring(stats, 1, version)
    assert stats.summary()["count"] == 2
    assert len(caplog.records) == 1


def test_what_a_killed_trainer_published_last_is_skipped_once_the_next_ones_first_version_is_confirmed():
    stats = SyncStats()
    bring(stats, 1, 0)
    stats.published(PolicyVersion(1, 1))
    assert stats.summary()["skipped"] == 0
    bring(stats, 2, 0)
    assert (stats.summary()["count"], stats.summary()["skipped"]) == (0, 1)


def test_the_first_version_of_every_incarnation_is_not_counted():
    stats = SyncStats()
    for incarnation in (1, 2):
        for version in range(3):
            bring(stats, incarnation, version)
    assert (stats.summary()["count"], stats.summary()["skipped"]) == (4, 0)
