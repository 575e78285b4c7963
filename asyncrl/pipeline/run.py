"""A run in progress: the supervisor on an event loop of its own thread, and the handle that a user holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from asyncrl.errors import RunError

if TYPE_CHECKING:
    from asyncrl.services.supervisor import Supervisor


@dataclass(frozen=True)
class EndedRun:
    """Stands for the supervisor of a run that needs none any more."""

    summary: dict[str, Any]

    async def supervise(self) -> dict[str, Any]:
        return self.summary

    def request_stop(self, seconds: float | None = None) -> None:
        """There is nothing to stop."""

    async def status(self) -> dict[str, Any]:
        return {"state": "ended", **self.summary}


class Run:
    """One launched run. Its methods may be called from any thread."""

    def __init__(
        self,
        run_dir: Path,
        make_supervisor: Callable[[], Supervisor | EndedRun],
        *,
        lock: IO[bytes] | None = None,
        resumed: Sequence[str] = (),
    ):
        """lock: on the folder, let go at the end. resumed: lines for a person about a run that goes on."""
        self.run_dir, self.resumed = run_dir, tuple(resumed)
        self._lock = lock
        self._make_supervisor = make_supervisor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervisor: Supervisor | EndedRun | None = None
        self._summary: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._main, name="asyncrl-run", daemon=True)
        self._thread.start()
        self._up.wait()

    @classmethod
    def ended(cls, run_dir: Path, summary: dict[str, Any]) -> Run:
        """A run that was finished before: nothing is started."""
        return cls(run_dir, lambda: EndedRun(summary), resumed=("the run is finished already: this is its summary",))

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """The summary, once the run has ended. Raises TimeoutError after `timeout` seconds; Ctrl-C meanwhile stops the run, waits
        for its end, and goes on as KeyboardInterrupt."""
        try:
            self._join(timeout)
        except KeyboardInterrupt:
            self.stop()
            self._join(None)
            raise
        if self._error is not None:
            raise RunError(f"the supervisor failed: {type(self._error).__name__}: {self._error}") from self._error
        assert self._summary is not None, "a run ends with a summary or an error"
        return self._summary

    def stop(self, seconds: float | None = None) -> None:
        """Ask the run to end, as interrupted, with a checkpoint where they are on. Returns at once. seconds: all the time that
        there is for it."""
        if self._loop is not None and self._supervisor is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._supervisor.request_stop, seconds)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """What `asyncrl status` shows."""
        if self.done or self._loop is None or self._supervisor is None:
            return {"state": (self._summary or {}).get("status", "failed"), **(self._summary or {})}
        return asyncio.run_coroutine_threadsafe(self._supervisor.status(), self._loop).result(timeout)

    def _join(self, timeout: float | None) -> None:
        """Join in slices, so that signals are handled meanwhile."""
        waited = 0.0
        while self._thread.is_alive():
            slice_seconds = 0.2 if timeout is None else min(0.2, timeout - waited)
            if slice_seconds <= 0:
                raise TimeoutError(f"the run in {self.run_dir} is still going after {timeout} s")
            self._thread.join(slice_seconds)
            waited += slice_seconds

    def _main(self) -> None:
        try:
            asyncio.run(self._supervise())
        except BaseException as error:  # the boundary of the thread: raised again by `wait`, in the caller's thread
            self._error = error
        finally:
            self._up.set()
            if self._lock is not None:
                self._lock.close()

    async def _supervise(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._supervisor = self._make_supervisor()
        self._up.set()
        self._summary = await self._supervisor.supervise()
