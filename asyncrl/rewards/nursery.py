"""Child processes: one started ahead of need, so that a killed one is replaced at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.errors import RunError, UserError
from asyncrl.rewards.child import LENGTH, MARK, pack, unpack
from asyncrl.rewards.function import FunctionSpec

log = logging.getLogger(__name__)

Role = Literal["serial", "concurrent"]
END_SECONDS = 5.0
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class LoadedFunction:
    """What a child found a function to be: the fields that it takes, and whether it is async."""

    accepts: tuple[str, ...]
    is_async: bool


class Child:
    """One process with the functions loaded. Its frames are described in `asyncrl.rewards.child`."""

    def __init__(
        self, process: subprocess.Popen[bytes], channel: tuple[asyncio.StreamReader, asyncio.StreamWriter], mark: mmap.mmap
    ):
        self._process, (self._reader, self._writer), self._mark = process, channel, mark

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, value: Any) -> None:
        self._writer.write(pack(value))

    async def read(self) -> Any:
        """The next frame's value. Raises IncompleteReadError or ConnectionError when the process is gone."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return unpack(await self._reader.readexactly(length))

    def marked_call(self) -> int | None:
        """The id of the async call whose code runs at this moment."""
        (value,) = MARK.unpack(self._mark[: MARK.size])
        return None if value == 0 else int(value) - 1

    def kill(self) -> None:
        """SIGKILL, with whatever the functions started: one that holds the interpreter's lock hears nothing else."""
        if self._process.returncode is None:  # not reaped yet, so the group's number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()

    async def ended(self) -> str:
        """Kill what is left, reap it, and say how it ended."""
        self.kill()
        for _ in range(round(END_SECONDS / POLL_SECONDS)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(POLL_SECONDS)
        code = self._process.returncode
        if code is None:
            return "does not end"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class Nursery:
    """Starts children, and keeps one ready ahead of need. They are children of this process and die with it.

    Children are spawned from the thread of the event loop, because the kernel ties their death to that thread's.
    """

    def __init__(
        self, specs: Sequence[FunctionSpec], limit_seconds: float, output: Path | None = None, *, load_seconds: float = 120.0
    ):
        """load_seconds: for a child to load the functions (importing a user's module may load much)."""
        self._output, self._load_seconds = output, load_seconds
        self._hello = {
            "functions": [[spec.name, spec.source, spec.payload] for spec in specs],
            "limit_seconds": limit_seconds,
            "path": [path for path in sys.path if path],
        }
        self._spare: asyncio.Task[tuple[Child, list[LoadedFunction]]] | None = None
        self._alive: list[Child] = []
        self._closed = False

    async def first(self) -> list[LoadedFunction]:
        """Start the first child; what it found the functions to be. Raises UserError when they cannot be loaded."""
        self._spare = asyncio.create_task(self._start())
        return (await asyncio.shield(self._spare))[1]

    async def take(self, role: Role) -> Child:
        """A child for this role: the one that is ready; the next is started meanwhile."""
        if self._closed:
            raise RunError("the reward functions are closed")
        assert self._spare is not None, "take before first"
        spare, self._spare = self._spare, None
        try:
            child, _ = await spare
        finally:
            if not self._closed:
                self._spare = asyncio.create_task(self._start())
                self._spare.add_done_callback(_retrieve)
        child.send({"role": role})
        return child

    async def discard(self, child: Child) -> str:
        """End a child; how it ended. One that ended by itself keeps its own reason."""
        if child in self._alive:
            self._alive.remove(child)
        await asyncio.sleep(0.01)  # a process that closed its socket by dying has its exit code a moment later
        return await child.ended()

    async def close(self) -> None:
        self._closed = True
        if self._spare is not None:
            self._spare.cancel()
            await asyncio.gather(self._spare, return_exceptions=True)
        await asyncio.gather(*(child.ended() for child in self._alive))
        self._alive.clear()

    async def _start(self) -> tuple[Child, list[LoadedFunction]]:
        child = await self._spawn()
        child.send(self._hello)
        try:
            async with asyncio.timeout(self._load_seconds):
                answer = await child.read()
        except TimeoutError:
            await self.discard(child)
            raise UserError(
                f"loading the reward functions took more than {self._load_seconds:.0f} s (cluster.start_timeout_seconds): import "
                "less in their module, or raise that"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            how = await self.discard(child)
            raise UserError(
                f"loading the reward functions ended the process ({how}): import their module by itself to see why"
            ) from None
        if "refused" in answer:
            await self.discard(child)
            raise UserError(f"the reward functions could not be loaded: {answer['refused']}")
        return child, [LoadedFunction(tuple(accepts), is_async) for accepts, is_async in answer["ready"]]

    async def _spawn(self) -> Child:
        ours, theirs = socket.socketpair()
        mark_fd = os.memfd_create("asyncrl-reward-mark")
        output = os.open(self._output, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if self._output is not None else None
        try:
            os.ftruncate(mark_fd, mmap.PAGESIZE)
            mark = mmap.mmap(mark_fd, mmap.PAGESIZE)
            process = subprocess.Popen(  # noqa: ASYNC220  (from this thread on purpose; it takes a few ms)
                [sys.executable, "-P", "-m", "asyncrl.rewards.child", str(theirs.fileno()), str(mark_fd), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # of its own, to be killed as a whole
                pass_fds=(theirs.fileno(), mark_fd),
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        finally:
            theirs.close()
            os.close(mark_fd)
            if output is not None:
                os.close(output)
        try:
            child = Child(process, await asyncio.open_connection(sock=ours), mark)
        except asyncio.CancelledError:
            process.kill()
            process.wait()
            raise
        self._alive.append(child)
        return child


def _retrieve(task: asyncio.Task[Any]) -> None:
    """A spare that could not be started is reported to whoever takes it; here only so that asyncio does not complain as well."""
    if not task.cancelled() and task.exception() is not None:
        log.warning("no spare reward process: %s", task.exception())
