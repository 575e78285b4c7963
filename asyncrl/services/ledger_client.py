"""The ledger over remote calls: both halves of the wire, beside each other so that they agree.

Ids travel as [epoch, row, attempt], ends as [epoch, row, attempt, state, reason, reissue]. Every call may be made again, and is
when no answer comes: the process at the other end may be a new one, which does not know what its predecessor was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from asyncrl.errors import DeadlineExceeded, IllegalTransition, LedgerCorrupt, LedgerError, RemoteError
from asyncrl.ledger.states import plain_text
from asyncrl.messages import GroupId
from asyncrl.protocols import (
    Dispatch,
    End,
    LedgerClient,
    LedgerEvents,
    LiveGroup,
    PromptCursor,
    Resumption,
    ReturnedGroup,
    StepRecord,
)
from asyncrl.transport.rpc import RpcClient

DEADLINE_SECONDS = 60.0
TRY_SECONDS = 3.0  # of silence, until a call is made again
_ERRORS: dict[str, type[LedgerError]] = {kind.__name__: kind for kind in (LedgerError, IllegalTransition, LedgerCorrupt)}


class RpcLedgerClient:
    """A `LedgerClient` that speaks to the message_queue service over `client`, which stays its giver's to close.

    Raises what the ledger raised there, and DeadlineExceeded when it does not answer within `deadline` seconds (of the end of
    the wait, for `watch`), however often it is asked; give it `queue.reconnect_seconds`.
    """

    def __init__(self, client: RpcClient, *, deadline: float = DEADLINE_SECONDS, try_seconds: float = TRY_SECONDS):
        self._client = client
        self._deadline, self._try_seconds = deadline, try_seconds

    async def dispatch(self, groups: Sequence[Dispatch], cursor: PromptCursor) -> None:
        await self._call("ledger.dispatch", groups=_pack_dispatches(groups), cursor=list(astuple(cursor)))

    async def end(self, ends: Sequence[End]) -> None:
        await self._call("ledger.end", ends=_pack_ends(ends))

    async def finish_step(self, record: StepRecord) -> None:
        bound, ends = record.staleness_bound, _pack_ends(record.ends)
        await self._call("ledger.finish_step", step=record.step, version=record.version, ends=ends, staleness_bound=bound)

    async def finish_training(self, final_version: int) -> None:
        await self._call("ledger.finish_training", final_version=final_version)

    async def watch(self, since: int, timeout: float) -> LedgerEvents:
        answer = await self._call("ledger.watch", since=since, wait=timeout, extra=timeout)
        return LedgerEvents(
            answer["seq"],
            _unpack_ends(answer["ended"]),
            answer["finished_steps"],
            answer["training_done"],
            answer["final_version"],
            answer["staleness_bound"],
        )

    async def live(self) -> list[LiveGroup]:
        return [LiveGroup(GroupId(*id), start_version, state) for *id, start_version, state in await self._call("ledger.live")]

    async def resume_rollouter(self) -> Resumption:
        answer = await self._call("ledger.resume_rollouter")
        return Resumption(
            seq=answer["seq"],
            finished_steps=answer["finished_steps"],
            final_version=answer["final_version"],
            cursor=None if answer["cursor"] is None else PromptCursor(*answer["cursor"]),
            live=tuple(LiveGroup(GroupId(*id), version, state) for id, version, state in answer["live"]),
            returned=tuple(ReturnedGroup(GroupId(*id), tuple(missing)) for id, missing in answer["returned"]),
            owed=tuple(GroupId(*id) for id in answer["owed"]),
            failures_by_row=dict(answer["failures_by_row"]),
            staleness_bound=answer["staleness_bound"],
        )

    async def restart(self, groups: Sequence[Dispatch]) -> None:
        await self._call("ledger.restart", groups=_pack_dispatches(groups))

    async def sync(self) -> None:
        await self._call("ledger.sync")

    async def checkpointed(self, step: int) -> None:
        await self._call("ledger.checkpointed", step=step)

    async def counts(self) -> dict[str, Any]:
        """The terms of the law, and the reasons, as in summary.json."""
        counts: dict[str, Any] = await self._call("ledger.counts")
        return counts

    async def _call(self, method: str, *, extra: float = 0.0, **params: Any) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadline + extra
        while True:
            left = deadline - loop.time()
            try:
                return await self._client.call(method, timeout=min(self._try_seconds + extra, left), **params)
            except DeadlineExceeded:
                if loop.time() >= deadline:
                    raise
            except RemoteError as error:
                kind = _ERRORS.get(error.kind)
                if kind is None:
                    raise
                raise kind(error.text) from error


def ledger_handlers(ledger: LedgerClient, counts: Callable[[], Mapping[str, Any]]) -> dict[str, Callable[..., Any]]:
    """What the message_queue service serves under ``ledger.…``: `ledger`, for others."""

    def dispatch(groups: list[Any], cursor: list[Any]) -> Awaitable[None]:
        return ledger.dispatch(_unpack_dispatches(groups), PromptCursor(*cursor))

    def restart(groups: list[Any]) -> Awaitable[None]:
        return ledger.restart(_unpack_dispatches(groups))

    def end(ends: list[Any]) -> Awaitable[None]:
        return ledger.end(_unpack_ends(ends))

    def finish_step(step: int, version: int, ends: list[Any], staleness_bound: int | None) -> Awaitable[None]:
        return ledger.finish_step(StepRecord(step, version, _unpack_ends(ends), staleness_bound))

    async def watch(since: int, wait: float) -> dict[str, Any]:
        events = await ledger.watch(since, wait)
        return {
            "seq": events.seq,
            "ended": _pack_ends(events.ended),
            "finished_steps": events.finished_steps,
            "training_done": events.training_done,
            "final_version": events.final_version,
            "staleness_bound": events.staleness_bound,
        }

    async def resume_rollouter() -> dict[str, Any]:
        resumption = await ledger.resume_rollouter()
        return {
            "seq": resumption.seq,
            "finished_steps": resumption.finished_steps,
            "final_version": resumption.final_version,
            "cursor": None if resumption.cursor is None else list(astuple(resumption.cursor)),
            "live": [[list(group.id), group.start_version, group.state] for group in resumption.live],
            "returned": [[list(group.id), list(group.missing)] for group in resumption.returned],
            "owed": [list(id) for id in resumption.owed],
            "failures_by_row": [list(item) for item in resumption.failures_by_row.items()],
            "staleness_bound": resumption.staleness_bound,
        }

    async def live() -> list[Any]:
        return [[*group.id, group.start_version, group.state] for group in await ledger.live()]

    return {
        "ledger.dispatch": dispatch,
        "ledger.end": end,
        "ledger.finish_step": finish_step,
        "ledger.finish_training": ledger.finish_training,
        "ledger.watch": watch,
        "ledger.live": live,
        "ledger.resume_rollouter": resume_rollouter,
        "ledger.restart": restart,
        "ledger.sync": ledger.sync,
        "ledger.checkpointed": ledger.checkpointed,
        "ledger.counts": counts,
    }


def _pack_dispatches(groups: Sequence[Dispatch]) -> list[Any]:
    return [[*group.id, group.start_version] for group in groups]


def _unpack_dispatches(groups: Sequence[Any]) -> list[Dispatch]:
    return [Dispatch(GroupId(*id), start_version) for *id, start_version in groups]


def _pack_ends(ends: Sequence[End]) -> list[Any]:
    return [[*end.id, end.state, plain_text(end.reason), end.reissue] for end in ends]


def _unpack_ends(ends: Sequence[Any]) -> tuple[End, ...]:
    return tuple(End(GroupId(*id), state, reason, reissue) for *id, state, reason, reissue in ends)
