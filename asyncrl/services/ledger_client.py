"""The ledger over remote calls: both halves of the wire, beside each other so that they agree.

Ids travel as [epoch, row, attempt], ends as [epoch, row, attempt, state, reason, reissue].
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from asyncrl.errors import IllegalTransition, LedgerCorrupt, LedgerError, RemoteError
from asyncrl.ledger.states import plain_text
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, LedgerClient, LedgerEvents, LiveGroup, PromptCursor, StepRecord
from asyncrl.transport.rpc import RpcClient

DEADLINE_SECONDS = 30.0
_ERRORS: dict[str, type[LedgerError]] = {kind.__name__: kind for kind in (LedgerError, IllegalTransition, LedgerCorrupt)}


class RpcLedgerClient:
    """A `LedgerClient` that speaks to the message_queue service over `client`, which stays its giver's to close.

    Raises what the ledger raised there, and DeadlineExceeded when it does not answer within `deadline` seconds (of the end of
    the wait, for `watch`).
    """

    def __init__(self, client: RpcClient, *, deadline: float = DEADLINE_SECONDS):
        self._client = client
        self._deadline = deadline

    async def dispatch(self, groups: Sequence[Dispatch], cursor: PromptCursor) -> None:
        started = [[*group.id, group.start_version] for group in groups]
        await self._call("ledger.dispatch", groups=started, cursor=list(astuple(cursor)))

    async def end(self, ends: Sequence[End]) -> None:
        await self._call("ledger.end", ends=_pack_ends(ends))

    async def finish_step(self, record: StepRecord) -> None:
        await self._call("ledger.finish_step", step=record.step, version=record.version, ends=_pack_ends(record.ends))

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
        )

    async def live(self) -> list[LiveGroup]:
        return [LiveGroup(GroupId(*id), start_version, state) for *id, start_version, state in await self._call("ledger.live")]

    async def counts(self) -> dict[str, Any]:
        """The terms of the law, and the reasons, as in summary.json."""
        counts: dict[str, Any] = await self._call("ledger.counts")
        return counts

    async def _call(self, method: str, *, extra: float = 0.0, **params: Any) -> Any:
        try:
            return await self._client.call(method, timeout=self._deadline + extra, **params)
        except RemoteError as error:
            kind = _ERRORS.get(error.kind)
            if kind is None:
                raise
            raise kind(error.text) from error


def ledger_handlers(ledger: LedgerClient, counts: Callable[[], Mapping[str, Any]]) -> dict[str, Callable[..., Any]]:
    """What the message_queue service serves under ``ledger.…``: `ledger`, for others."""

    def dispatch(groups: list[Any], cursor: list[Any]) -> Awaitable[None]:
        started = [Dispatch(GroupId(*id), start_version) for *id, start_version in groups]
        return ledger.dispatch(started, PromptCursor(*cursor))

    def end(ends: list[Any]) -> Awaitable[None]:
        return ledger.end(_unpack_ends(ends))

    def finish_step(step: int, version: int, ends: list[Any]) -> Awaitable[None]:
        return ledger.finish_step(StepRecord(step, version, _unpack_ends(ends)))

    async def watch(since: int, wait: float) -> dict[str, Any]:
        events = await ledger.watch(since, wait)
        return {
            "seq": events.seq,
            "ended": _pack_ends(events.ended),
            "finished_steps": events.finished_steps,
            "training_done": events.training_done,
            "final_version": events.final_version,
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
        "ledger.counts": counts,
    }


def _pack_ends(ends: Sequence[End]) -> list[Any]:
    return [[*end.id, end.state, plain_text(end.reason), end.reissue] for end in ends]


def _unpack_ends(ends: Sequence[Any]) -> tuple[End, ...]:
    return tuple(End(GroupId(*id), state, reason, reissue) for *id, state, reason, reissue in ends)
