"""What a run could leave behind, and its removal: processes that outlived their stop, and shared memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import psutil

from asyncrl.weight_sync.slots import SHARED_MEMORY, run_prefix

log = logging.getLogger(__name__)


def shared_memory_of(run_id: str) -> str:
    """The path with which those of the run's files in shared memory begin."""
    return str(SHARED_MEMORY / run_prefix(run_id))


def remove_shared_memory(run_id: str) -> list[str]:
    """Names of the files that were still there."""
    removed = []
    for path in SHARED_MEMORY.glob(f"{run_prefix(run_id)}*"):
        path.unlink(missing_ok=True)
        removed.append(path.name)
    return removed


def kill_with_children(processes: Iterable[psutil.Process], wait_seconds: float = 5.0) -> None:
    """SIGKILL these processes and everything below them, and wait until they are gone. A process id that was given to somebody
    else meanwhile is left alone (psutil compares start times)."""
    doomed: list[psutil.Process] = []
    for process in processes:
        try:
            doomed += [*process.children(recursive=True), process]
        except psutil.NoSuchProcess:
            continue
    for process in doomed:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(doomed, timeout=wait_seconds)
    for process in alive:
        log.warning("process %d is still there %.0f s after SIGKILL", process.pid, wait_seconds)
