"""The queue against a Ray actor around a deque: 8 KB samples, every sample a message of its own.

Baseline. A Ray actor holds a deque with `put` and `get`; as with ours, a producer and a consumer in processes of their own call
it. *One at a time*: each awaits a call before the next. *64 outstanding*: each has 64 calls in flight. A call carries one sample.
The choice matters: one client that makes both calls itself is faster for Ray (1,638/s with 64 outstanding, where ours made
11,755/s in the same run: 7.2 times, below the limit).

Ours. Producer, broker and consumer are three processes, on uvloop as the services are. The application calls `send([sample])`
once per sample, from as many coroutines as the rollouter has trajectories in flight by default (rollout.max_concurrent); how many
samples then share a socket write is the client's business, and no call carries more than one. The consumer takes what is there.
The same figure stands against both baselines; for information, `awaited` is our rate when each `send` is awaited before the
next. A rate counts from the first send to the moment when the consumer has decoded the last sample.

Checked in every run of ours: all samples arrive, each once, in order, and the topic never held more than its capacity.
Each figure is the best of several rounds, ours and the baseline's taken in turn, so that a noisy neighbour hits both.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this file's name is that of a standard module: its folder must leave the path before all imports

import asyncio
import collections
import gc
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np
import ray
import uvloop

from asyncrl.clock import SystemClock
from asyncrl.errors import StreamClosed
from asyncrl.messages import Trajectory, TrajectoryId
from asyncrl.transport.broker import Broker
from asyncrl.transport.client import QueueReceiver, QueueSender
from asyncrl.transport.envelopes import pack
from asyncrl.transport.exchange import Exchange
from asyncrl.transport.topic import TopicSpec

SAMPLE_BYTES = 8192
OUTSTANDING = 64
CONCURRENT = 256
CAPACITY = 256
ROUNDS = 3
SAMPLES = 40_000
AWAITED_SAMPLES = 3_000
RAY_SAMPLES = {1: 1_000, OUTSTANDING: 4_000}
LIMITS = {"one_at_a_time": 15.0, "64_outstanding": 10.0}
TIMEOUT = 120.0


def sample(number: int) -> Trajectory:
    """A trajectory that takes about SAMPLE_BYTES on the wire, as a single-turn rollout would make it."""
    num_tokens = (SAMPLE_BYTES - 240) // 13
    tokens = np.arange(num_tokens, dtype=np.int32)
    return Trajectory(
        id=TrajectoryId(0, number, 0, 0),
        group_size=8,
        start_version=0,
        prompt_tokens=tokens[:8],
        response_tokens=tokens,
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        log_probs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int32),
        finish_reason="stop",
        prompt="1+2=",
        response="3",
        ground_truth="3",
    )


# ── the baseline ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@ray.remote(num_cpus=0)
class DequeActor:
    """The queue that one would write first."""

    def __init__(self) -> None:
        self._items: collections.deque[bytes] = collections.deque()

    def put(self, item: bytes) -> None:
        self._items.append(item)

    def get(self) -> bytes | None:
        return self._items.popleft() if self._items else None


@ray.remote(num_cpus=0)
class Producer:
    def run(self, queue, count: int, outstanding: int) -> float:
        """Put `count` samples, at most `outstanding` calls unanswered; when the first was sent."""
        item, waiting = os.urandom(SAMPLE_BYTES), collections.deque()
        began = time.perf_counter()
        for _ in range(count):
            if len(waiting) == outstanding:
                ray.get(waiting.popleft(), timeout=TIMEOUT)
            waiting.append(queue.put.remote(item))
        ray.get(list(waiting), timeout=TIMEOUT)
        return began


@ray.remote(num_cpus=0)
class Consumer:
    def run(self, queue, count: int, outstanding: int) -> float:
        """Get `count` samples, asking again where the deque was empty; when the last was there."""
        waiting: collections.deque = collections.deque()
        taken = 0
        while taken < count:
            if len(waiting) < min(outstanding, count - taken):
                waiting.append(queue.get.remote())
            elif ray.get(waiting.popleft(), timeout=TIMEOUT) is not None:
                taken += 1
        return time.perf_counter()


def ray_rate(outstanding: int) -> float:
    """Samples per second through the actor."""
    queue, producer, consumer = DequeActor.remote(), Producer.remote(), Consumer.remote()
    for count in (OUTSTANDING, RAY_SAMPLES[outstanding]):  # the first round starts, connects and warms
        calls = [end.run.remote(queue, count, outstanding) for end in (producer, consumer)]
        began, ended = ray.get(calls, timeout=TIMEOUT)
    for actor in (queue, producer, consumer):
        ray.kill(actor)
    return count / (ended - began)


# ── ours ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def broker_process(pipe: Connection, capacity_bytes: int) -> None:
    """Serve until told to stop, then report the topic's figures."""

    async def serve() -> None:
        exchange = Exchange([TopicSpec("rollouts", CAPACITY, capacity_bytes, ("producer",))], lease_seconds=30.0)
        broker = Broker(exchange, clock=SystemClock())
        pipe.send(await broker.start())
        while not pipe.poll():  # noqa: ASYNC110 (the pipe has no asyncio event)
            await asyncio.sleep(0.05)
        pipe.send(broker.stats()["rollouts"])
        await broker.close()

    uvloop.run(serve())


def consumer_process(pipe: Connection, address: str) -> None:
    """Take until the stream ends; report when the last sample was there, and every id in the order it came."""

    async def consume() -> None:
        receiver = QueueReceiver(address, "rollouts")
        rows: list[int] = []
        last = 0.0
        try:
            while True:
                taken = await receiver.receive(max_items=CAPACITY, timeout=TIMEOUT)
                rows += [delivery.message.id.row for delivery in taken]
                await receiver.settle([str(delivery.message.id) for delivery in taken])
                last = time.perf_counter()
        except StreamClosed:
            pipe.send((last, rows))
        await receiver.close()

    uvloop.run(consume())


def our_rate(count: int, outstanding: int) -> tuple[float, bool]:
    """Samples per second through the broker, and whether nothing was lost, doubled or reordered and the bound held."""
    messages = [sample(number) for number in range(count)]
    gc.collect()
    gc.freeze()  # the samples made beforehand are no part of what is measured, and of no use to the collector
    size = len(pack(messages[0]).payload)
    capacity_bytes = CAPACITY * size
    context = multiprocessing.get_context("spawn")
    broker_pipe, broker_end = context.Pipe()
    broker = context.Process(target=broker_process, args=(broker_end, capacity_bytes))
    broker.start()
    address = broker_pipe.recv()
    consumer_pipe, consumer_end = context.Pipe()
    consumer = context.Process(target=consumer_process, args=(consumer_end, address))
    consumer.start()

    async def produce() -> float:
        sender = QueueSender(address, "rollouts", producer="producer")
        left = iter(messages[1:])

        async def one_after_another() -> None:
            for message in left:
                await sender.send([message])

        await sender.send(messages[:1])  # connected, and warm
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(outstanding):
                group.create_task(one_after_another())
        await sender.close()
        return began

    began = uvloop.run(produce())
    last, rows = consumer_pipe.recv()
    broker_pipe.send(None)
    figures = broker_pipe.recv()
    for process in (consumer, broker):
        process.join(TIMEOUT)
    intact = rows == list(range(count)) and figures["accepted"] == figures["settled"] == count
    bounded = figures["max_depth"] <= CAPACITY and figures["max_bytes"] <= capacity_bytes
    return (count - 1) / (last - began), intact and bounded


def main() -> int:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ours, awaited, intact = 0.0, 0.0, True
    baseline = dict.fromkeys(RAY_SAMPLES, 0.0)
    for _ in range(ROUNDS):
        for outstanding in RAY_SAMPLES:
            baseline[outstanding] = max(baseline[outstanding], ray_rate(outstanding))
        rate, right = our_rate(SAMPLES, CONCURRENT)
        ours, intact = max(ours, rate), intact and right
        rate, right = our_rate(AWAITED_SAMPLES, 1)
        awaited, intact = max(awaited, rate), intact and right
        print(f"ours {ours:,.0f}/s, awaited {awaited:,.0f}/s, ray { ({key: round(rate) for key, rate in baseline.items()}) }")
    ray.shutdown()
    checks = [
        {"name": name, "ratio": round(ours / rate, 2), "ours": round(ours), "baseline": round(rate), "limit": LIMITS[name]}
        for name, rate in zip(LIMITS, baseline.values(), strict=True)
    ]
    for check in checks:
        check["ok"] = check["ratio"] >= check["limit"]
    ok = intact and all(check["ok"] for check in checks)
    first = checks[0]
    result = {"name": "queue", **{key: first[key] for key in ("ratio", "ours", "baseline", "limit")}, "ok": ok, "checks": checks}
    result |= {"nothing_lost_doubled_or_reordered_and_bound_held": intact, "awaited": round(awaited)}
    print(json.dumps(result))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
