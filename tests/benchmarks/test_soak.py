"""The soak benchmark can fail: what leaks is refused, what does not is not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.soak import BYTES, DESCRIPTORS, MEMORY, Readings, Series, checks_of, failed_of, family_of, judged, taken_by

MB = 1e6
MINUTES = 27.0
LEAK = """
kept = []

def score(prompt, response, ground_truth):
    kept.append(b"x" * 20_000)
    return float(response == ground_truth)
"""


def series(value: Callable[[float], float], minutes: float = MINUTES) -> Series:
    """`value(minute)`, read every five seconds."""
    made = Series()
    for reading in range(int(minutes * 12)):
        made.add(reading * 5.0, value(reading / 12))
    return made


@pytest.mark.parametrize(("per_ten_minutes", "accepted"), [(0.0, True), (0.85, True), (1.15, False), (3.0, False)])
def test_memory_that_grows_by_a_megabyte_in_ten_minutes_is_refused_under_noise_as_large(per_ten_minutes: float, accepted: bool):
    dice = random.Random(0)
    verdict = judged(series(lambda minute: (100 + per_ten_minutes * minute / 10 + dice.uniform(-1, 1)) * MB), MEMORY)
    assert verdict["ok"] is accepted, verdict


@pytest.mark.parametrize(("more", "of", "accepted"), [(9, 100, True), (11, 100, False), (19, 400, True), (21, 400, False)])
def test_memory_may_end_five_percent_or_ten_megabytes_higher(more: float, of: float, accepted: bool):
    short = series(lambda minute: (of + more * (minute > 4)) * MB, minutes=9)
    assert judged(short, MEMORY)["ok"] is accepted


def test_a_cache_that_fills_and_levels_off_is_no_leak():
    verdict = judged(series(lambda minute: 100 * MB + min(minute, 5) * 1.5 * MB), MEMORY)
    assert verdict["ok"], verdict


def test_neither_spikes_nor_a_sawtooth_of_memory_are_a_leak():
    spikes = series(lambda minute: (180 if int(minute * 12) % 37 == 0 else 100) * MB)
    sawtooth = series(lambda minute: (100 + 8 * (minute % 3)) * MB)
    assert judged(spikes, MEMORY)["ok"]
    assert judged(sawtooth, MEMORY)["ok"]


@pytest.mark.parametrize(("minutes_for_one", "accepted"), [(5.0, False), (60.0, True)])
def test_descriptors_that_are_opened_and_never_closed_are_refused(minutes_for_one: float, accepted: bool):
    assert judged(series(lambda minute: 70 + minute // minutes_for_one), DESCRIPTORS)["ok"] is accepted


def test_connections_that_are_opened_once_are_no_leak():
    assert judged(series(lambda minute: 70 if minute < 6 else 74), DESCRIPTORS)["ok"]


@pytest.mark.parametrize(("more_a_round", "accepted"), [(0.0, True), (2.0, False)])
def test_files_that_come_and_go_are_judged_by_their_crests(more_a_round: float, accepted: bool):
    sawtooth = series(lambda minute: (32 * (minute % 2) / 2 + more_a_round * (minute // 2)) * MB)
    assert judged(sawtooth, BYTES)["ok"] is accepted


def test_what_a_child_of_a_process_allocates_and_opens_counts_with_it():
    held = 30_000_000
    before = taken_by(family_of(os.getpid()))
    script = (
        f"held = bytearray(range(256)) * ({held} // 256); files = [open('/dev/null') for _ in range(20)]; print('up'); input()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        after = taken_by(family_of(os.getpid()))
        child.communicate(b"\n")
    assert held <= after[0] - before[0] <= held + 20_000_000
    assert after[2] - before[2] >= 20


class TestAFolder:
    """Readings of a run's folder, which this test grows; the run's process is the test's own."""

    @pytest.fixture
    def readings(self, tmp_path: Path) -> Readings:
        run_dir = tmp_path / "run"
        (run_dir / "logs").mkdir(parents=True)
        (tmp_path / "tmp").mkdir()
        self.run_dir = run_dir
        self.say(process=os.getpid())
        return Readings(run_dir, tmp_path, os.getpid())

    def say(self, *, process: int) -> None:
        (self.run_dir / "run.json").write_text(json.dumps({"run_id": "none", "processes": {"reward": [process, "here"]}}))

    def failed(self, readings: Readings, grow: Callable[[int], None]) -> list[str]:
        for reading in range(12):
            (self.run_dir / "metrics.jsonl").write_text(f'{{"step": {reading + 1}}}\n')
            grow(reading)
            readings.read(5.0 * reading)
        return failed_of(checks_of(readings, 0.0))

    def test_what_is_kept_on_purpose_may_grow(self, readings: Readings):
        def grow(reading: int) -> None:
            (self.run_dir / "ledger.sqlite").write_bytes(bytes(500_000 * reading))
            (self.run_dir / "logs" / "reward.log").write_bytes(bytes(500_000 * reading))

        assert self.failed(readings, grow) == []

    def test_any_other_file_that_grows_is_named(self, readings: Readings):
        def grow(reading: int) -> None:
            (self.run_dir / "ledger.sqlite-wal").write_bytes(bytes(500_000 * reading))

        assert self.failed(readings, grow) == ["bytes of ledger.sqlite-wal (MB)"]

    def test_a_file_that_appears_late_has_grown_from_nothing(self, readings: Readings):
        def grow(reading: int) -> None:
            if reading > 8:
                (self.run_dir / "forgotten").write_bytes(bytes(3_000_000))

        assert self.failed(readings, grow) == ["bytes of forgotten (MB)"]

    def test_temporary_files_left_behind_are_named(self, readings: Readings):
        def grow(reading: int) -> None:
            (self.run_dir.parent / "tmp" / f"left-{reading}").touch()
            (self.run_dir.parent / "tmp" / f"behind-{reading}").touch()

        assert self.failed(readings, grow) == ["files of temporary files"]

    def test_a_process_that_was_started_again_is_named(self, readings: Readings):
        failed = self.failed(readings, lambda reading: self.say(process=[os.getpid(), os.getppid()][reading > 6]))
        assert "processes are those of the start" in failed


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_with_a_reward_that_leaks_is_refused(tmp_path: Path):
    function = tmp_path / "leak.py"
    function.write_text(LEAK)
    command = [sys.executable, "-m", "tests.benchmarks.soak", "--minutes", "4", "--set"]
    soak = subprocess.run(
        [*command, f"reward.functions=[{{function: {function}:score}}]"], capture_output=True, text=True, check=False
    )
    assert soak.returncode == 1, soak.stderr
    result = json.loads(soak.stdout.splitlines()[-1])
    assert [name for name in result["failed"] if name.startswith("memory")] == ["memory of reward/0 (MB)"]
