"""Figures of the updates, which outlive the process that counts them."""

from __future__ import annotations

import logging
import random
import tracemalloc

import pytest

from asyncrl.protocols.weights import PolicyVersion
from asyncrl.services.parameter_sync.stats import REMEMBERED, Spread, SyncStats

A = "inference/0"


def bring(stats: SyncStats, incarnation: int, version: int, *, server: str = A) -> None:
    stats.published(PolicyVersion(incarnation, version))
    stats.confirmed(PolicyVersion(incarnation, version), server=server, pause_ms=1.5, transfer_ms=20.0, bytes=1000)


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


@pytest.mark.parametrize("reason", ["differs", "failed", "unasked"])
def test_what_was_live_unverified_stays_so_whoever_counts_next(tmp_path, reason):
    stats = SyncStats(tmp_path / "sync.jsonl")
    bring(stats, 1, 0)
    stats.unverified(PolicyVersion(1, 1), server=A, reason=reason)
    again = SyncStats(tmp_path / "sync.jsonl")
    bring(again, 1, 1)
    assert (again.summary()["verified"], again.summary()["unanswered"]) == (False, 0)


def test_a_comparison_that_no_answer_came_to_counts_apart_and_is_open_until_that_server_confirms(tmp_path):
    stats = SyncStats(tmp_path / "sync.jsonl")
    bring(stats, 1, 0)
    stats.unverified(PolicyVersion(1, 1), server=A, reason="unanswered")
    again = SyncStats(tmp_path / "sync.jsonl")
    bring(again, 1, 1, server="inference/1")
    assert (again.summary()["verified"], again.summary()["unanswered"]) == (False, 1), "another server says nothing of it"
    bring(again, 1, 2)
    assert (again.summary()["verified"], again.summary()["unanswered"]) == (True, 1)


def test_a_line_that_gives_no_reason_is_taken_for_the_worst(tmp_path):
    (tmp_path / "sync.jsonl").write_text('{"event":"unverified","version":"1.1","server":"inference/0"}\n')
    stats = SyncStats(tmp_path / "sync.jsonl")
    bring(stats, 1, 0)
    assert stats.summary()["verified"] is False


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


def test_versions_without_number_take_no_memory_and_are_all_counted():
    stats = SyncStats()
    bring(stats, 1, 0)
    sizes = []
    tracemalloc.start()
    for part in range(3):
        for version in range(1 + part * 2 * REMEMBERED, 1 + (part + 1) * 2 * REMEMBERED):
            if version % 4:
                bring(stats, 1, version)
            else:
                stats.published(PolicyVersion(1, version))
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[2] - sizes[1] < 20_000, sizes
    bring(stats, 1, 6 * REMEMBERED + 1)
    summary = stats.summary()
    assert (summary["count"], summary["skipped"]) == (6 * REMEMBERED * 3 // 4 + 1, 6 * REMEMBERED // 4)


def test_a_version_that_two_servers_confirm_counts_once_and_is_not_skipped_when_the_second_is_late():
    stats = SyncStats()
    for version in range(3):
        bring(stats, 1, version)
    bring(stats, 1, 1)
    assert (stats.summary()["count"], stats.summary()["skipped"]) == (2, 0)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_quantiles_are_those_of_all_values_to_a_hundredth(share: float):
    dice, spread = random.Random(0), Spread()
    values = sorted(dice.lognormvariate(0, 2) for _ in range(5000))
    for value in values:
        spread.add(value)
    exact = values[max(0, -(-int(share * 100) * len(values) // 100) - 1)]
    assert exact - 0.001 <= spread.quantile(share) <= exact * 1.01 + 0.001


def test_there_is_no_quantile_of_nothing_and_zero_is_a_value():
    spread = Spread()
    assert spread.quantile(0.5) == 0.0
    spread.add(0.0)
    assert spread.quantile(1.0) == 0.0
