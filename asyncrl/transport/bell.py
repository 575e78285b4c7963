"""Ends another thread's sleep in a poller. Loaded inside server processes too: zmq is all that it needs."""

from __future__ import annotations

import secrets

import zmq

POLLIN = zmq.POLLIN


class Bell:
    """`socket` stands in the poller of the thread that made it, which calls `hush` once awake; anybody may `ring`."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._address = f"inproc://bell-{secrets.token_hex(8)}"
        self.socket = self._context.socket(zmq.PULL)
        self.socket.bind(self._address)

    def ring(self) -> None:
        with self._context.socket(zmq.PUSH) as caller:
            caller.connect(self._address)
            caller.send(b"")

    def hush(self) -> None:
        while self.socket.poll(0):
            self.socket.recv()

    def close(self) -> None:
        self.socket.close(linger=0)
