"""The janitor: a process beside the launcher that outlives it, and clears away what a launcher that was killed could not.

    launcher ══pipe══▶ janitor     b"done", end of file ─▶ it leaves
                                   end of file alone    ─▶ kill what bears the run's mark, remove its files, leave

It runs with nothing but the standard library, so that it is there in 30 ms and holds few megabytes. Every process of a run
inherits the run's mark (asyncrl/processes.py). Ray's agents write their title over theirs; they are known by their log files,
which are open in the run's own folder of Ray.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl import processes

MARK = "ASYNCRL_RUN_ID"
OWN_END_SECONDS = 3.0  # what Ray's processes get to notice the launcher's death by themselves
LEAVE_SECONDS = 5.0
DONE = b"done"
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from asyncrl.cluster.janitor import main; main(*sys.argv[2:])"


class Janitor:
    """The launcher's hand on it. It is nobody's child, so that whoever kills the launcher's children does not kill it."""

    def __init__(self, run_id: str, *, files: str, folders: Sequence[str] = ()):
        """files: a path in shared memory, with which the paths of the run's files there begin; folders: the run's alone."""
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(__file__).parents[2]), run_id, files, *folders]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True
        )
        with suppress(subprocess.TimeoutExpired):  # a busy machine: it forks a little later
            self._process.wait(LEAVE_SECONDS)

    def dismiss(self) -> None:
        """The launcher has cleared everything away itself. Returns when the janitor has gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdout, suppress(BrokenPipeError):  # broken: somebody killed it
            self._process.stdin.write(DONE)
            self._process.stdin.close()
            self._process.stdout.read()  # ends with the janitor, which has nothing left to do


def marked_processes(run_id: str, folders: Sequence[str] = ()) -> list[int]:
    """Ids of the processes on this host, zombies and this one aside, that bear the run's mark, or are Ray's and have a file open
    under one of the run's `folders`."""
    found = processes.marked(MARK, run_id)
    if not folders:
        return found
    under = tuple(f"{folder}/" for folder in folders)
    return [*found, *(pid for pid in processes.all_processes() if pid not in found and _is_rays(pid) and _holds(pid, under))]


def kill_marked(run_id: str, folders: Sequence[str] = ()) -> int:
    """SIGKILL them, and those that they start meanwhile, until none is left. Returns how many there were."""
    return processes.kill(lambda: marked_processes(run_id, folders))


def _is_rays(pid: int) -> bool:
    return processes.read(pid, "comm").startswith((b"ray", b"gcs_server"))


def _holds(pid: int, under: tuple[str, ...]) -> bool:
    """Whether the process has a file open whose path begins so."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(os.readlink(entry.path).startswith(under) for entry in entries)
    except OSError:
        return False


def main(run_id: str, files: str, *folders: str) -> None:
    """The janitor's life."""
    if os.fork():
        os._exit(0)
    if sys.stdin.buffer.read() == DONE:
        return
    deadline = time.monotonic() + OWN_END_SECONDS
    while marked_processes(run_id, folders) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill_marked(run_id, folders)
    for path in Path(files).parent.glob(f"{Path(files).name}*"):
        path.unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
