"""A disk that refuses while a run goes on: it costs that checkpoint and is told, and the next one is tried."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.checkpoint import Checkpoints
from tests.chaos.test_kills import SETS
from tests.end_to_end.runs import Launched, until

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]

ONE_CHECKPOINT = "2m"  # and no second one beside it


class Disk:
    """A file system of its own for a run's checkpoints."""

    def __init__(self, place: Path):
        self.place = place

    def mount(self, options: str) -> bool:
        place = ["-t", "tmpfs", "tmpfs", str(self.place)] if not os.path.ismount(self.place) else [str(self.place)]
        return subprocess.run(["mount", "-o", options, *place], check=False, capture_output=True).returncode == 0

    def turn(self, options: str) -> None:
        """Busy as long as somebody writes."""
        until(lambda: self.mount(f"remount,{options}"), 30, f"the disk turned {options}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "run" / "checkpoints")
    disk.place.mkdir(parents=True)
    if not disk.mount(f"size={ONE_CHECKPOINT}"):
        pytest.skip("mounting a file system takes rights that this user does not have")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk.place)], check=True)


def test_a_disk_that_is_full_and_one_that_may_not_be_written_cost_checkpoints_and_not_the_run(tmp_path: Path, disk: Disk) -> None:
    run = Launched(tmp_path / "run", *SETS, "training.steps=100000", "queue.durability=process", short=False)
    log = run.run_dir / "logs" / "trainer-0.log"

    def failed() -> int:
        return max((int(line["checkpoint/failed"]) for line in run.lines_so_far("metrics.jsonl")), default=0)

    def newest() -> int:
        info = Checkpoints(run.run_dir).newest_complete()
        return info.step if info is not None else 0

    run.until(lambda: newest() > 0 and failed() > 0, 150, "a checkpoint, and one for which there was no room")
    assert "gave 'No space left on device': make room on the disk or quota that holds" in log.read_text()
    disk.turn("size=100m")
    before = newest()
    run.until(lambda: newest() > before, 60, "a checkpoint once there is room")
    disk.turn("ro")
    before = failed()
    run.until(lambda: failed() > before, 60, "one that may not be written")
    assert "gave 'Read-only file system': give this user the right to read and write" in log.read_text()
    assert next(row for row in run.status()["services"] if row["name"] == "trainer/0")["checkpoints_failed"] > before
    disk.turn("rw")
    before = newest()
    run.until(lambda: newest() > before, 60, "a checkpoint once it may be written again")
    assert run.command("stop").returncode == 0
    assert run.wait(60) == 130, run.text[-4000:]
    told = run.summary["checkpoints"]
    assert told["checkpoint"] == run.summary["steps"] == newest(), "a stop saves"
    assert told["checkpoints_failed"] == failed() >= 2
    assert "gave 'Read-only file system': give this user" in told["checkpoint_error"]
    assert run.command("audit").returncode == 0
