"""What a run could leave behind, and its removal: processes that outlived their stop, shared memory, temporary folders."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from asyncrl import processes
from asyncrl.weight_sync.slots import SHARED_MEMORY, run_prefix

log = logging.getLogger(__name__)


def shared_memory_of(run_id: str) -> str:
    """The path with which those of the run's files in shared memory begin."""
    return str(SHARED_MEMORY / run_prefix(run_id))


class Folders(NamedTuple):
    """Of a run that has a Ray of its own. ray: Ray's; scratch: its processes' temporary files, of which SGLang leaves some."""

    ray: Path
    scratch: Path


def folders_of(run_id: str) -> Folders:
    """Ray's path is short: those of unix sockets have room for 107 characters."""
    return Folders(Path("/tmp", f"asyncrl-ray-{run_id}"), Path(tempfile.gettempdir(), f"asyncrl-{run_id}"))


def remove_folders(folders: Folders) -> None:
    """Whether they are there or not."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def remove_shared_memory(run_id: str) -> list[str]:
    """Names of the files that were still there."""
    removed = []
    for path in SHARED_MEMORY.glob(f"{run_prefix(run_id)}*"):
        path.unlink(missing_ok=True)
        removed.append(path.name)
    return removed


class Family:
    """Processes with everything below them, and what they have in shared memory, as they are now. A process id that is given to
    somebody else later is left alone (psutil compares start times)."""

    def __init__(self, parents: Iterable[psutil.Process]):
        self._members: list[psutil.Process] = []
        for parent in parents:
            with suppress(psutil.NoSuchProcess):
                self._members += [*parent.children(recursive=True), parent]
        self._files = processes.shared_files([member.pid for member in self._members])

    def kill(self, wait_seconds: float = 5.0) -> None:
        """SIGKILL them, wait until they are gone, and remove what they left in shared memory."""
        for member in self._members:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        _, alive = psutil.wait_procs(self._members, timeout=wait_seconds)
        for member in alive:
            log.warning("process %d is still there %.0f s after SIGKILL", member.pid, wait_seconds)
        for path in self._files:
            path.unlink(missing_ok=True)
