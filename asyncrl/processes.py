"""Processes of this host that bear a mark, an environment variable that every child inherits: found, and ended without leftovers.

Whoever starts what may outlive him gives it a mark; then no list of processes can be out of date, and no new parent hides one.
Nothing but the standard library: the janitor runs it in a Python of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

KILL_SECONDS = 10.0
SHARED_MEMORY = "/dev/shm/"
LEFT_BEHIND = ("sglang_loads_", "sem.mp-")  # files that their makers do not remove when they are killed: SGLang's, Python's


def marked(name: str, value: str) -> list[int]:
    """Ids of the processes that bear the mark, zombies and this one aside. Those that may not be looked at are none of them."""
    mark = f"{name}={value}".encode()
    return [pid for pid in all_processes() if mark in read(pid, "environ").split(b"\0")]


def all_processes() -> list[int]:
    """But for this one."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid()]


def read(pid: int, name: str) -> bytes:
    """A file that /proc has of a process; empty where it is gone, or somebody else's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def shared_files(pids: Collection[int]) -> set[Path]:
    """What these processes have in shared memory and would leave there. Known by the inode: a semaphore is mapped under another
    name than it has."""
    lines = [line.split(maxsplit=5) for pid in pids for line in read(pid, "maps").decode(errors="replace").splitlines()]
    inodes = {int(line[4]) for line in lines if len(line) == 6 and line[5].startswith(SHARED_MEMORY)}
    if not inodes:
        return set()
    with os.scandir(SHARED_MEMORY) as entries:
        return {Path(entry.path) for entry in entries if entry.name.startswith(LEFT_BEHIND) and entry.inode() in inodes}


def kill(find: Callable[[], list[int]], *, seconds: float = KILL_SECONDS) -> int:
    """SIGKILL what `find` finds, and what that starts meanwhile, until it finds none; then remove what they left in shared
    memory. Returns how many there were."""
    killed: set[int] = set()
    files: set[Path] = set()
    deadline = time.monotonic() + seconds
    while (left := find()) and time.monotonic() < deadline:
        files |= shared_files(left)
        for pid in left:
            killed.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for path in files:
        path.unlink(missing_ok=True)
    return len(killed)
