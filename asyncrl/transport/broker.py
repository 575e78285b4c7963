"""The broker: an Exchange behind a ROUTER socket, on the event loop of the message_queue process."""

from __future__ import annotations

from typing import NoReturn

from asyncrl.clock import Clock
from asyncrl.transport.exchange import Exchange


class Broker:
    """Moves messages between senders, the exchange and receivers. Use `broker.exchange` for settle, unsettled and stats."""

    def __init__(self, exchange: Exchange, *, clock: Clock, bind: str = "tcp://127.0.0.1:*"):
        self.exchange = exchange
        self._clock = clock
        self._bind = bind

    async def start(self) -> str:
        """Bind and serve on the running loop; returns the address for `QueueSender` and `QueueReceiver`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop serving. What is unsettled stays in the exchange. Closing twice is harmless."""

    def poke(self) -> None:
        """Grant what a settlement outside a wake-up has freed (call after `exchange.settle…` from an RPC handler)."""

    async def watch(self) -> NoReturn:
        """Wait for a hook to raise, and raise that; the broker has stopped then. Never returns otherwise."""
        raise NotImplementedError

    def stats(self) -> dict[str, dict[str, float]]:
        """`Exchange.stats` at this moment, plus "frames": refused frames of peers, by their error's name."""
        return self.exchange.stats(self._clock.now())
