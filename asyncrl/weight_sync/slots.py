"""Staging slots: files in /dev/shm that a trainer rank writes and that receivers and ParameterSync read.

Plain files and mmap, so that no resource tracker unlinks them behind our back; whoever ends a run can sweep them by name.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from pathlib import Path

from asyncrl.errors import SyncError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "asyncrl-"
NAME = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{1,200}}")
NUM_SLOTS = 2


def run_prefix(run_id: str) -> str:
    """Every shared-memory file of a run begins so."""
    return f"{PREFIX}{run_id}-"


def slot_name(run_id: str, rank: int, slot: int) -> str:
    return f"{run_prefix(run_id)}r{rank}-s{slot}"


def create_slot(name: str, num_bytes: int) -> mmap.mmap:
    """A new file of zeros, its memory reserved at once. One of that name, which a killed trainer left, is replaced, not reused:
    whoever still reads that one keeps its bytes."""
    path = SHARED_MEMORY / name
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(1, num_bytes))
        return mmap.mmap(descriptor, max(1, num_bytes))
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        raise SyncError(
            f"a staging slot needs {num_bytes / 1e6:.0f} MB of shared memory and /dev/shm is full: "
            "free some, enlarge it, or train with more ranks"
        ) from error
    finally:
        os.close(descriptor)


def remove_slot(name: str) -> None:
    (SHARED_MEMORY / name).unlink(missing_ok=True)


class SlotMaps:
    """Read-only maps of slots, opened when first asked for and again when the file behind the name is another one."""

    def __init__(self) -> None:
        self._maps: dict[str, tuple[tuple[int, int], mmap.mmap]] = {}

    def open(self, name: str) -> memoryview:
        """The slot's bytes. Raises SyncError for a name that is no slot's, or a slot that is gone."""
        if not NAME.fullmatch(name):
            raise SyncError(f"{name!r} is not the name of a staging slot ({PREFIX}…)")
        try:
            descriptor = os.open(SHARED_MEMORY / name, os.O_RDONLY)
        except FileNotFoundError as error:
            raise SyncError(f"staging slot {name} is gone: the trainer that made it has ended, or is on another host") from error
        try:
            stat = os.fstat(descriptor)
            key = (stat.st_ino, stat.st_size)
            known = self._maps.get(name)
            if known is None or known[0] != key:
                known = (key, mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
                self._maps[name] = known
        finally:
            os.close(descriptor)
        return memoryview(known[1])

    def close(self) -> None:
        """Forget the maps; their memory goes with the last view of it."""
        self._maps.clear()
