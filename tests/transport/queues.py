"""Both implementations of the queue behind one face, for the conformance suite."""

from __future__ import annotations

from asyncrl.clock import SystemClock
from asyncrl.transport.broker import Broker
from asyncrl.transport.client import QueueReceiver, QueueSender
from asyncrl.transport.exchange import Exchange, QueueHooks
from asyncrl.transport.local import LocalQueue, LocalReceiver, LocalSender
from asyncrl.transport.topic import TopicSpec

TIMEOUT = 20.0  # seconds after which a wait in a test has failed


class QueueUnderTest:
    """An exchange with one of the two ways in. Ends opened through it are closed with it."""

    def __init__(self, kind: str):
        self.kind = kind
        self.exchange: Exchange
        self.broker: Broker | None = None
        self._local: LocalQueue
        self._address = ""
        self._ends: list[QueueSender | QueueReceiver | LocalSender | LocalReceiver] = []

    async def open(self, *topics: TopicSpec, lease_seconds: float = 30.0, hooks: QueueHooks | None = None) -> QueueUnderTest:
        self.exchange = Exchange(topics, lease_seconds=lease_seconds, hooks=hooks)
        if self.kind == "socket":
            self.broker = Broker(self.exchange, clock=SystemClock())
            self._address = await self.broker.start()
        else:
            self._local = LocalQueue(self.exchange, clock=SystemClock())
        return self

    def sender(self, topic: str = "rollouts", producer: str = "rollouter") -> QueueSender | LocalSender:
        if self.kind == "socket":
            sender: QueueSender | LocalSender = QueueSender(
                self._address, topic, producer=producer, heartbeat_seconds=0.05, silence_seconds=10
            )
        else:
            sender = self._local.sender(topic, producer=producer)
        self._ends.append(sender)
        return sender

    def receiver(self, topic: str = "rollouts") -> QueueReceiver | LocalReceiver:
        if self.kind == "socket":
            receiver: QueueReceiver | LocalReceiver = QueueReceiver(
                self._address, topic, heartbeat_seconds=0.05, silence_seconds=10
            )
        else:
            receiver = self._local.receiver(topic)
        self._ends.append(receiver)
        return receiver

    def stats(self, topic: str = "rollouts") -> dict[str, float]:
        return (self.broker or self._local).stats()[topic]

    async def close(self) -> None:
        for end in self._ends:
            end.abandon()
        if self.broker is not None:
            await self.broker.close()


def topic(
    name: str = "rollouts", *, items: int = 64, size: int = 10**7, producers: tuple[str, ...] = ("rollouter",)
) -> TopicSpec:
    return TopicSpec(name, items, size, producers)
