"""The rollouter's eye on ParameterSync, over remote calls."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import DeadlineExceeded
from asyncrl.protocols.weights import FleetView, ServerLoad, ServerView
from asyncrl.transport.rpc import RpcClient

_POLL_SECONDS = 2.0  # one question; what was asked of a ParameterSync that died is asked again after this and the next
_LATE_SECONDS = 2.0
_GRACE_SECONDS = 10.0


class RpcFleet:
    """protocols.Fleet over RPC. A ParameterSync that was started again numbers its views anew: its first view is told whatever
    its `seq`. Raises DeadlineExceeded when ParameterSync is silent for 10 s past the time asked for."""

    def __init__(self, address: str):
        self._client = RpcClient(address)
        self._session: str | None = None

    async def watch(self, since: int, timeout: float) -> FleetView:
        deadline = time.monotonic() + timeout
        while True:
            patience = min(max(deadline - time.monotonic(), 0.0), _POLL_SECONDS)
            try:
                answer = await self._client.call(
                    "fleet", timeout=patience + _LATE_SECONDS, since=since, patience=patience, session=self._session
                )
            except DeadlineExceeded:
                if time.monotonic() > deadline + _GRACE_SECONDS:
                    raise
                continue
            is_another = answer["session"] != self._session
            self._session = answer["session"]
            if is_another or answer["seq"] > since or time.monotonic() >= deadline:
                return view_from_wire(answer)

    async def close(self) -> None:
        await self._client.close()


def view_to_wire(view: FleetView, session: str) -> dict[str, Any]:
    """session: of the ParameterSync whose view it is."""
    return {
        "session": session,
        "seq": view.seq,
        "incarnation": view.incarnation,
        "confirmed": view.confirmed,
        "published": view.published,
        "servers": [[s.name, s.url, s.state, s.version, None if s.load is None else list(s.load)] for s in view.servers],
    }


def view_from_wire(wire: Mapping[str, Any]) -> FleetView:
    servers = tuple(
        ServerView(name, url, state, version, None if load is None else ServerLoad(*load))
        for name, url, state, version, load in wire["servers"]
    )
    return FleetView(wire["seq"], wire["incarnation"], wire["confirmed"], wire["published"], servers)
