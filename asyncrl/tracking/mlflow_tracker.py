"""Metrics to MLflow, off the hot path.

thread      consumes             waits for                        is unblocked by
mlflow      records, the end     a call's worth of records, the   `log`, `finish`, the clock
                                 time to gather, a pause

`log` appends to memory and returns. The thread imports mlflow, creates the run, and sends what has gathered, as many values a
call as the store takes. A call that fails is made again after a pause; meanwhile the run goes on. A record leaves memory when a
call that carried it has returned, or when it stands in the spool: nothing logged is lost. `finish` waits a bounded time; what is
not delivered by then is spooled, with a note that says how to replay it.

A metric's name belongs to the axis that logged it first; another axis's metric of that name becomes ``axis/name``, because the
steps of two axes do not count the same thing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from asyncrl.tracking.facts import name_of
from asyncrl.tracking.spool import EndStatus, Record, RunFacts, Spool
from asyncrl.tracking.store import METRICS_PER_CALL, MlflowStore, Store

log = logging.getLogger(__name__)

GATHER_SECONDS = 5.0  # one call for many values: in SQLite a call costs as much as a hundred values
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
RECORDS_IN_MEMORY = 200_000
FINISH_SECONDS = 15.0
LOCAL_FINISH_SECONDS = 60.0  # a busy machine takes long to import mlflow and to make its tables, but it gets there


class MlflowTracker:
    """One run in one store. facts: called once, on the thread, because it may take a while (git). run_id: of an MLflow run that
    goes on; its parameters are those of its first start. Where the store has it no more, a new one is made."""

    def __init__(
        self,
        facts: Callable[[], RunFacts],
        run_dir: Path,
        *,
        artifacts_at_start: Sequence[Path] = (),
        open_store: Callable[[str], Store] = MlflowStore,
        wall: Callable[[], float] = time.time,
        finish_seconds: float = LOCAL_FINISH_SECONDS,
        run_id: str | None = None,
    ):
        self._make_facts, self._run_dir, self._open_store, self._wall = facts, run_dir, open_store, wall
        self._artifacts = list(artifacts_at_start)
        self._finish_seconds = finish_seconds
        self._changed = threading.Condition()
        self._records: deque[Record] = deque()
        self._per_call = METRICS_PER_CALL  # until the store says more
        self._owners: dict[str, str] = {}
        self._end: tuple[EndStatus, list[Path], int] | None = None
        self._abandoned = False
        self._spool: Spool | None = None
        self._overflowed = False
        self._described = False  # parameters are there
        self._goes_on = run_id
        self.run_id: str | None = None
        self._thread = threading.Thread(target=self._main, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        """Returns at once. Finite or not, every value is kept."""
        milliseconds = int(self._wall() * 1000)
        with self._changed:
            if self._end is not None:
                log.warning("metrics of %s came after the MLflow run had ended, and are dropped", axis)
                return
            self._records += [Record(self._name(axis, name), float(v), milliseconds, int(step)) for name, v in metrics.items()]
            if len(self._records) >= self._per_call:
                self._changed.notify()

    def finish(self, status: EndStatus, artifacts: Sequence[Path] = (), seconds: float | None = None) -> bool:
        """End the run; blocks for `finish_seconds` at most, or for `seconds` where that is less. False when something had to be
        spooled."""
        with self._changed:
            if self._end is None:
                self._end = (status, list(artifacts), int(self._wall() * 1000))
            self._changed.notify()
        self._thread.join(self._finish_seconds if seconds is None else min(seconds, self._finish_seconds))
        with self._changed:
            if self._thread.is_alive():
                self._abandon()
            return not self._abandoned and not self._overflowed

    async def close(self) -> None:
        """`finish`, as finished, off the event loop."""
        await asyncio.to_thread(self.finish, "FINISHED")

    # ---- the thread --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        facts = self._make_facts()
        self._spool = Spool(self._run_dir, facts)
        pause, store = FIRST_PAUSE_SECONDS, None
        while True:
            ending = self._end is not None
            try:
                store = store or self._open_store(facts.uri)
                self._per_call = store.metrics_per_call
                if self._deliver(store, facts):
                    return
                pause = FIRST_PAUSE_SECONDS
            except Exception as error:  # boundary: the store is somebody else's machine, and must neither slow nor end the run
                log.warning("MLflow at %s: %s: %s", facts.uri, type(error).__name__, error)
                with self._changed:
                    if ending:  # it had its last chance
                        self._abandon()
                        return
                    self._changed.wait_for(lambda: self._end is not None, pause)
                    self._spool_overflow()
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            if self._abandoned:
                return

    def _deliver(self, store: Store, facts: RunFacts) -> bool:
        """Send what there is; True when that was the last of it and the run has ended."""
        if self.run_id is None:
            self.run_id = self._reopened(store) or store.create(facts)
        if not self._described:
            store.params(self.run_id, facts.params)
            self._described = True
        while self._artifacts and not self._abandoned:
            if self._artifacts[0].exists():
                store.artifact(self.run_id, self._artifacts[0])
            del self._artifacts[0]
        with self._changed:
            self._changed.wait_for(lambda: len(self._records) >= self._per_call or self._end is not None, GATHER_SECONDS)
        while (batch := self._oldest()) and not self._abandoned:
            store.metrics(self.run_id, batch)
            self._forget(batch)
        with self._changed:
            end = self._end if not self._records else None
        if end is None or self._abandoned:
            return False
        status, artifacts, end_ms = end
        for path in artifacts:
            if path.exists():
                store.artifact(self.run_id, path)
        store.end(self.run_id, status, end_ms)
        return True

    def _reopened(self, store: Store) -> str | None:
        """The id of the run that goes on, or None."""
        if self._goes_on is None:
            return None
        if not store.reopen(self._goes_on):
            log.warning("MLflow has no run %s any more: a new one is made", self._goes_on)
            return None
        self._described = True
        return self._goes_on

    def _oldest(self) -> list[Record]:
        with self._changed:
            return list(islice(self._records, self._per_call))

    def _forget(self, delivered: Sequence[Record]) -> None:
        with self._changed:
            if not self._abandoned:
                for _ in delivered:
                    self._records.popleft()

    # ---- under the lock ----------------------------------------------------------------------------------------

    def _name(self, axis: str, name: str) -> str:
        mine = self._owners.setdefault(name, axis) == axis
        return name_of(name if mine else f"{axis}/{name}")

    def _spool_overflow(self) -> None:
        """A store that stays away must not fill the memory."""
        if len(self._records) > RECORDS_IN_MEMORY and self._spool is not None:
            half = [self._records.popleft() for _ in range(RECORDS_IN_MEMORY // 2)]
            self._spool.metrics(half, self.run_id)
            self._overflowed = True

    def _abandon(self) -> None:
        """Give up on the store: everything not delivered goes to the spool. Once."""
        if self._abandoned:
            return
        self._abandoned = True
        assert self._end is not None
        spool = self._spool or Spool(self._run_dir, self._make_facts())
        spool.metrics(list(self._records), self.run_id)
        status, artifacts, end_ms = self._end
        spool.end(self.run_id, status, [*self._artifacts, *artifacts], end_ms)
        self._records.clear()
        log.warning("MLflow did not take everything: the rest is in %s; once it answers, run: %s", spool.path, self._remedy())

    def _remedy(self) -> str:
        return f"python -m asyncrl.tracking.replay {self._run_dir}"
