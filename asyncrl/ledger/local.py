"""The ledger in this process: what the message queue service serves, and what the simulator uses as it is.

Every change is checked by the state machine, made there at once, and written to the file with others a moment later; a
finished step and the end of training are in the file before the call returns, because others act on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from asyncrl.errors import LedgerError
from asyncrl.ledger.states import END_STATES, Attempts, Changes
from asyncrl.ledger.store import LedgerWriter, samples
from asyncrl.messages import GroupId
from asyncrl.protocols.ledger import Dispatch, End, LedgerEvents, LiveGroup, PromptCursor, StepRecord

FLUSH_SECONDS = 0.05


class LocalLedgerClient:
    """A `LedgerClient` over its own state machine, and over a file when `writer` is given.

    `on_end(ids)`, where set, is called with the groups that have just ended, before anybody else learns of it.
    """

    def __init__(self, writer: LedgerWriter | None = None):
        self.attempts = Attempts()
        self.failure: LedgerError | None = None
        self.num_watching = 0
        self._writer: LedgerWriter | None = None
        if writer is not None:
            self.write_to(writer)
        self.on_end: Callable[[Sequence[GroupId]], None] | None = None
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()
        self._flush_due: asyncio.TimerHandle | None = None

    def write_to(self, writer: LedgerWriter) -> None:
        """From now on the file holds what happens; what it holds already has happened. Before the first change only."""
        assert self.attempts.dispatched == 0, "the file is opened before anything happens"
        self._writer, self.attempts = writer, writer.attempts

    async def dispatch(self, groups: Sequence[Dispatch], cursor: PromptCursor) -> None:
        changes = self.attempts.dispatch(groups, cursor)
        self._record(changes)
        self._tell(changes)

    async def end(self, ends: Sequence[End]) -> None:
        changes = self.attempts.end(ends)
        self._record(changes)
        self._tell(changes)

    async def finish_step(self, record: StepRecord) -> None:
        changes = self.attempts.finish_step(record)
        self._record(changes)
        self.flush()
        self._tell(changes)

    async def finish_training(self, final_version: int) -> None:
        changes = self.attempts.finish_training(final_version)
        self._record(changes)
        self.flush()
        self._tell(changes)

    async def watch(self, since: int, timeout: float) -> LedgerEvents:
        if self.attempts.seq <= since and self.failure is None:
            self.num_watching += 1
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                pass
            finally:
                self.num_watching -= 1
        self._raise_failure()
        return self.attempts.events(since)

    async def live(self) -> list[LiveGroup]:
        return self.attempts.live()

    def queue(self, ids: Sequence[GroupId]) -> None:
        """The queue has accepted the scored groups of these attempts, and nobody has taken them yet."""
        self._record(self.attempts.queue(ids))

    def cut_short(self, ends: Sequence[End]) -> None:
        """Ends that the queue makes by itself, without the groups' holders."""
        changes = self.attempts.cut_short(ends)
        self._record(changes)
        self._tell(changes)

    async def until_failed(self) -> NoReturn:
        """Wait for the file to refuse, and raise that LedgerError. Never returns otherwise."""
        await self._failed.wait()
        assert self.failure is not None
        raise self.failure

    def samples(self) -> dict[str, Any]:
        """The terms of the law and the reasons, as in summary.json."""
        return samples(self.attempts)

    def flush(self) -> None:
        """Write what is not written yet. A disk that refuses is remembered in `failure`: nothing is recorded after it."""
        if self._flush_due is not None:
            self._flush_due.cancel()
            self._flush_due = None
        if self._writer is None:
            return
        self._raise_failure()
        try:
            self._writer.flush()
        except LedgerError as error:
            self.failure = error
            self._failed.set()
            self._wake()
            raise

    def close(self) -> None:
        """Flush and let go of the file; those who wait are answered."""
        self._wake()
        if self._flush_due is not None:
            self._flush_due.cancel()
            self._flush_due = None
        if self._writer is not None and self.failure is None:
            self._writer.close()

    def _record(self, changes: Changes) -> None:
        if self._writer is None:
            return
        self._raise_failure()
        self._writer.append(changes)
        if self._flush_due is None:
            self._flush_due = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush_late)

    def _flush_late(self) -> None:
        self._flush_due = None
        try:
            self.flush()
        except LedgerError:
            return  # kept in `failure`: raised by every later call, and by the service that watches it

    def _tell(self, changes: Changes) -> None:
        ended = [transition.id for transition in changes.transitions if transition.state in END_STATES]
        if ended and self.on_end is not None:
            self.on_end(ended)
        if ended or changes.step is not None or changes.final_version is not None:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise LedgerError(f"nothing is recorded any more: {self.failure}") from self.failure
