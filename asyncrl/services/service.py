"""What every service is to the process that hosts it, and the remote calls that every service answers.

    host ── start() ──▶ addresses ──▶ (all services up) ──▶ run(book) ──▶ returns when its work is over
                                                              ▲
    supervisor ── rpc: status | summary | stop ───────────────┘

A service binds its sockets in `start`, so that nobody has to guess a port, and learns the others' addresses in `run`. One that
takes the place of a lost one binds where that was, so that nobody has to be told.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from asyncrl.transport.rpc import RpcServer

AddressBook = Mapping[str, Mapping[str, str]]
"""Row name (``trainer/0``) to kind (``rpc``, ``http``, …) to address."""

NOWHERE: Mapping[str, str] = MappingProxyType({})


class Service(Protocol):
    """One process of the run."""

    name: str

    async def start(self, earlier: Mapping[str, str] = NOWHERE) -> dict[str, str]:
        """Bind sockets, load models; the addresses by kind, ``rpc`` always among them. earlier: those that an earlier process of
        this row had, to be bound again."""

    async def run(self, book: AddressBook) -> None:
        """Work until the work is over or `stop` was asked. An exception here ends the run with this service's name."""

    async def stop(self) -> None:
        """Ask `run` to return soon and cleanly. Returns at once; may be called more than once, and before `run`."""

    def status(self) -> dict[str, Any]:
        """``state`` and ``version`` (None where a version means nothing here), and whatever else is worth a look."""

    def summary(self) -> dict[str, Any]:
        """This service's part of summary.json."""


def service_rpc(service: Service, handlers: Mapping[str, Callable[..., Any]] | None = None) -> RpcServer:
    """The service's remote calls: `status`, `summary`, `stop`, and its own handlers. Not started yet."""

    def status() -> dict[str, Any]:
        return {"name": service.name, "pid": os.getpid(), "host": socket.gethostname(), **service.status()}

    return RpcServer({"status": status, "summary": service.summary, "stop": service.stop, **(handlers or {})})
