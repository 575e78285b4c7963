"""Doors: where a run's sockets are bound, and who may speak with them.

    cluster.bind_address     ZeroMQ                                           HTTP
    loopback (default)       as it is: nobody from outside gets there         as it is
    beyond                   CURVE; a server admits the run's client key      a token, `Authorization: Bearer …`

A process belongs to one run: it enters that run's door once, and every socket that it opens from then on is bound, guarded and
made known as the door says. Keys travel over no channel: each process reads their files.

CURVE encrypts and authenticates both sides: a client without the server's public key gets no handshake, one whose own key is not
the run's is turned away by the doorkeeper, a thread that answers ZeroMQ's authentication requests (ZAP, ZeroMQ RFC 27). A socket
whose doorkeeper is gone admits nobody. Loaded inside server processes too: zmq is all that it needs.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from asyncrl.errors import UserError
from asyncrl.transport.hosts import EVERYWHERE, LOOPBACK, addresses_of_host, is_here, is_loopback, reachable_address
from asyncrl.transport.keys import Keys, read_keys

_ZAP_ADDRESS, _ZAP_VERSION, _ZAP_PARTS = "inproc://zeromq.zap.01", b"1.0", 7
_DOMAIN = b"asyncrl"
_DISMISSED = b"dismissed"
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Door:
    """host: where sockets are bound, 0.0.0.0 for every address of this machine; reached_at: what others are told; keys: None
    on loopback, where nothing is asked."""

    host: str = LOOPBACK
    reached_at: str = LOOPBACK
    keys: Keys | None = None

    @property
    def token(self) -> str | None:
        """What HTTP servers of the run ask for; None: nothing."""
        return self.keys.token if self.keys is not None else None

    def place(self, address: str) -> str:
        """Where to bind what would be bound at `address`: the same port, on this door's host."""
        return _with_host(address, self.host)

    def known_as(self, address: str) -> str:
        """What others are told of what is bound at `address`."""
        return _with_host(address, self.reached_at)

    def guard(self, socket: zmq.Socket[bytes], *, serves: bool) -> None:
        """Before it is bound or connected."""
        keys = self.keys
        if keys is None:
            return
        if not serves:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
            return
        assert keys.server_secret is not None, "who only calls does not serve"
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a doorkeeper nobody is admitted
        _Doorkeeper.of(socket.context).admit(keys.client_public)


_door = Door()


def door() -> Door:
    """This process's; loopback until it has entered another."""
    return _door


def enter(new: Door) -> None:
    """Sockets that are opened from now on are this door's."""
    global _door
    _door = new


def leave() -> None:
    """Back to loopback: what this process had open is closed."""
    enter(Door())
    dismiss(zmq.Context.instance())


def dismiss(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End the doorkeeper of this context, where it has one; needed before the context is terminated."""
    _Doorkeeper.dismiss(context)


def open_door(run_dir: Path, bind_address: str, *, node_address: str | None = None) -> Door:
    """The door of a process that serves in this run, whose launcher has made the keys. node_address: how others reach this host,
    where that is known. Raises UserError for an address that this host does not have, and for keys that cannot be used."""
    if not is_here(bind_address):
        raise UserError(
            f"cluster.bind_address is {bind_address}, which {sockets.gethostname()} does not have: give an address of this host "
            f"({', '.join(addresses_of_host().values())}), or {EVERYWHERE} where several hosts take part"
        )
    if is_loopback(bind_address):
        return Door(bind_address, bind_address)
    reached_at = bind_address if bind_address != EVERYWHERE else node_address or reachable_address()
    return Door(bind_address, reached_at, read_keys(run_dir, serves=True))


def door_to(run_dir: Path, address: str) -> Door:
    """For one who calls a live run from outside. Raises UserError where its keys may not be read, TransportError where they are
    gone, because the run ends."""
    host = address.partition("://")[2].rpartition(":")[0]
    return Door() if is_loopback(host) else Door(keys=read_keys(run_dir, serves=False))


def _with_host(address: str, host: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{host}:{rest.rpartition(':')[2]}" if scheme in ("tcp", "http") else address


class _Doorkeeper:
    """Answers for the sockets of one context: a client's key is among those admitted, or it is turned away.

    loop     consumes                    waits for    is unblocked by
    thread   authentication requests     the next     a handshake, `dismiss`
    """

    _all: dict[int, _Doorkeeper] = {}  # noqa: RUF012 (by context)
    _lock = threading.Lock()

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]):
        self._context = context
        self._admitted: frozenset[bytes] = frozenset()
        self._requests = context.socket(zmq.REP)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind(_ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._serve, name="doorkeeper", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, context: zmq.Context[zmq.Socket[bytes]]) -> _Doorkeeper:
        with cls._lock:
            keeper = cls._all.get(context.underlying)
            if keeper is None:
                keeper = cls._all[context.underlying] = cls(context)
            return keeper

    @classmethod
    def dismiss(cls, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with cls._lock:
            keeper = cls._all.pop(context.underlying, None)
        if keeper is not None:
            with context.socket(zmq.REQ) as socket:
                socket.connect(_ZAP_ADDRESS)
                socket.send(_DISMISSED)
                socket.poll(int(_LEAVE_SECONDS * 1000))
            keeper._thread.join(_LEAVE_SECONDS)

    def admit(self, public_key: str) -> None:
        """Clients with this key, from now on."""
        self._admitted |= {z85.decode(public_key)}

    def _serve(self) -> None:
        with self._requests as requests, contextlib.suppress(zmq.ContextTerminated):
            while (request := requests.recv_multipart()) != [_DISMISSED]:
                requests.send_multipart(self._answer(request))
            requests.unbind(_ZAP_ADDRESS)  # at once; closing gives the address back some time later
            requests.send(b"")

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """[version, request id, status code, status text, user id, metadata]"""
        if len(request) != _ZAP_PARTS or request[0] != _ZAP_VERSION:
            return [_ZAP_VERSION, b"", b"500", b"no request", b"", b""]
        _, request_id, domain, _address, _identity, mechanism, key = request
        if (domain, mechanism) == (_DOMAIN, b"CURVE") and key in self._admitted:
            return [_ZAP_VERSION, request_id, b"200", b"OK", b"", b""]
        return [_ZAP_VERSION, request_id, b"400", b"not of this run", b"", b""]
