"""The ledger in this process: what the message queue service serves, and what the simulator uses as it is.

Every change is checked by the state machine and made there at once; nobody is told of it before it is in the file. All changes of
one turn of the event loop share one transaction:

    dispatch, end, finish_step, … ─┐
    what the queue accepts ────────┼─▶ remembered ─▶ `flush`, at the latest in the next turn ─▶ callers return, watchers wake
    what the queue settles ────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from asyncrl.errors import LedgerError
from asyncrl.ledger.set_back import Held
from asyncrl.ledger.states import END_STATES, Attempts, Changes
from asyncrl.ledger.store import LedgerWriter, samples
from asyncrl.messages import GroupId
from asyncrl.protocols.ledger import (
    Dispatch,
    End,
    LedgerEvents,
    LiveGroup,
    PromptCursor,
    Resumption,
    ReturnedGroup,
    StepRecord,
)


class LocalLedgerClient:
    """A `LedgerClient` over its own state machine, and over a file when `writer` is given.

    Where set, `on_end(ids, step)` is called with the groups that have just ended, before the transaction that says so, so that
    what follows is in it; a checkpoint of `step` is the first that holds these ends. `on_checkpoint(step)` likewise. `held()`
    says what the queue holds; unless set, nothing is lost.
    """

    def __init__(self, writer: LedgerWriter | None = None):
        self.attempts = Attempts()
        self.failure: LedgerError | None = None
        self.num_watching = 0
        self._writer: LedgerWriter | None = None
        if writer is not None:
            self.write_to(writer)
        self.on_end: Callable[[Sequence[GroupId], int], None] | None = None
        self.on_checkpoint: Callable[[int], None] | None = None
        self.held: Callable[[], Held] | None = None
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()
        self._flushed: asyncio.Future[None] | None = None
        self._flush_due: asyncio.Handle | None = None
        self._news = False  # something that watchers wait for

    def write_to(self, writer: LedgerWriter) -> None:
        """From now on the file holds what happens; what it holds already has happened. Before the first change only."""
        assert self.attempts.dispatched == 0, "the file is opened before anything happens"
        self._writer, self.attempts = writer, writer.attempts

    @property
    def dirty(self) -> bool:
        """Something is made and not in the file yet."""
        return self._writer is not None and self._writer.dirty

    async def dispatch(self, groups: Sequence[Dispatch], cursor: PromptCursor) -> None:
        await self._made(self.attempts.dispatch(groups, cursor))

    async def end(self, ends: Sequence[End]) -> None:
        await self._made(self.attempts.end(ends))

    async def finish_step(self, record: StepRecord) -> None:
        await self._made(self.attempts.finish_step(record))

    async def finish_training(self, final_version: int) -> None:
        await self._made(self.attempts.finish_training(final_version))

    async def restart(self, groups: Sequence[Dispatch]) -> None:
        await self._made(self.attempts.restart(groups))

    async def sync(self) -> None:
        await self._in_file()
        if self._writer is not None:
            self._writer.sync()

    async def checkpointed(self, step: int) -> None:
        if step > self.attempts.finished_steps:
            raise LedgerError(f"step {step} cannot be in a checkpoint: {self.attempts.finished_steps} steps are finished")
        if self.on_checkpoint is not None:
            self.on_checkpoint(step)
        self._flush_soon()
        await self._in_file()

    async def resume_rollouter(self) -> Resumption:
        attempts, held = self.attempts, self.held() if self.held is not None else None
        if held is not None:
            lost = [group.id for group in attempts.live() if group.state == "in_flight" and held.missing(group.id)]
            self._record(attempts.take_back(lost, "the rollouter was lost"))
        await self._in_file()
        members = held.missing if held is not None else lambda id: ()
        return Resumption(
            seq=attempts.seq,
            finished_steps=attempts.finished_steps,
            final_version=attempts.final_version,
            cursor=attempts.cursor,
            live=tuple(attempts.live()),
            returned=tuple(ReturnedGroup(id, members(id)) for id in attempts.returned()),
            owed=tuple(attempts.owed()),
            failures_by_row=dict(attempts.failures_by_row),
            staleness_bound=attempts.staleness_bound,
        )

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
        await self._in_file()
        return self.attempts.events(since)

    async def live(self) -> list[LiveGroup]:
        await self._in_file()
        return self.attempts.live()

    def queue(self, ids: Sequence[GroupId]) -> None:
        """The queue has accepted the scored groups of these attempts, and nobody has taken them yet. `flush` must follow before
        anybody is told."""
        self._record(self.attempts.queue(ids))

    def cut_short(self, ends: Sequence[End]) -> None:
        """Ends that the queue makes by itself, without the groups' holders."""
        self._record(self.attempts.cut_short(ends))

    def take_back(self, ids: Iterable[GroupId], reason: str) -> None:
        """The data of these attempts is lost: they are to be generated again."""
        self._record(self.attempts.take_back(ids, reason))

    def close_streams(self, topic: str, producers: frozenset[str]) -> None:
        """These producers of the queue have ended their streams. `flush` must follow before anybody is told."""
        if self._writer is not None:
            self._writer.close_streams(topic, producers)
            self._flush_soon()

    async def until_failed(self) -> NoReturn:
        """Wait for the file to refuse, and raise that LedgerError. Never returns otherwise."""
        await self._failed.wait()
        assert self.failure is not None
        raise self.failure

    def samples(self) -> dict[str, Any]:
        """The terms of the law and the reasons, as in summary.json."""
        return samples(self.attempts)

    def flush(self) -> None:
        """Write what is not written yet, and let those know who wait for it. A disk that refuses is remembered in `failure`:
        nothing is recorded after it. Raises LedgerError."""
        if self._flush_due is not None:
            self._flush_due.cancel()
            self._flush_due = None
        flushed, self._flushed = self._flushed, None
        if self._writer is not None:
            try:
                self._raise_failure()
                self._writer.flush()
            except LedgerError as error:
                self.failure = self.failure or error
                self._failed.set()
                self._wake()
                if flushed is not None and not flushed.done():
                    flushed.set_exception(error)
                    flushed.exception()  # nobody may be waiting
                raise
        self._tell()
        if flushed is not None and not flushed.done():
            flushed.set_result(None)

    def close(self) -> None:
        """Flush and let go of the file; those who wait are answered."""
        if self._writer is not None and self.failure is None:
            self.flush()
            self._writer.close()
        elif self._writer is not None:
            self._writer.abandon()
        self._wake()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _made(self, changes: Changes) -> None:
        self._record(changes)
        await self._in_file()

    def _record(self, changes: Changes) -> None:
        """The change is made: it is for the file, and for those who wait to hear of it."""
        self._raise_failure()
        if not changes:
            return
        ended = [transition.id for transition in changes.transitions if transition.state in END_STATES]
        self._news |= bool(ended) or changes.step is not None or changes.final_version is not None
        if self._writer is not None:
            self._writer.append(changes)
            self._flush_soon()
        if ended and self.on_end is not None:
            in_step = changes.step is not None
            self.on_end(ended, self.attempts.finished_steps + (not in_step))
        if self._writer is None:
            self._tell()

    def _flush_soon(self) -> None:
        if self._writer is not None and self._flushed is None:
            loop = asyncio.get_running_loop()
            self._flushed = loop.create_future()
            self._flush_due = loop.call_soon(self._flush_late)

    def _flush_late(self) -> None:
        self._flush_due = None
        try:
            self.flush()
        except LedgerError:
            return  # kept in `failure`: raised by every later call, and by the service that watches it

    async def _in_file(self) -> None:
        """Until everything that has been made is in the file."""
        if self._flushed is not None:
            await asyncio.shield(self._flushed)
        self._raise_failure()

    def _tell(self) -> None:
        if self._news:
            self._news = False
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise LedgerError(f"nothing is recorded any more: {self.failure}") from self.failure
