"""The rollouter's eye on ParameterSync, over remote calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.protocols.weights import FleetView, ServerView
from asyncrl.transport.rpc import RpcClient

_GRACE_SECONDS = 10.0


class RpcFleet:
    """protocols.Fleet over RPC. Raises DeadlineExceeded when ParameterSync is silent for 10 s past the time asked for."""

    def __init__(self, address: str):
        self._client = RpcClient(address)

    async def watch(self, since: int, timeout: float) -> FleetView:
        answer = await self._client.call("fleet", timeout=timeout + _GRACE_SECONDS, since=since, patience=timeout)
        return view_from_wire(answer)

    async def close(self) -> None:
        await self._client.close()


def view_to_wire(view: FleetView) -> dict[str, Any]:
    return {
        "seq": view.seq,
        "incarnation": view.incarnation,
        "confirmed": view.confirmed,
        "published": view.published,
        "servers": [[s.name, s.url, s.state, s.version] for s in view.servers],
    }


def view_from_wire(wire: Mapping[str, Any]) -> FleetView:
    servers = tuple(ServerView(*row) for row in wire["servers"])
    return FleetView(wire["seq"], wire["incarnation"], wire["confirmed"], wire["published"], servers)
