"""The queue against a Ray actor around a deque: 8 KB samples, every sample a message of its own.

Baseline. A Ray actor holds a deque with `put` and `get`; a call carries one sample. It is called in two ways, and each is a
baseline of its own, because neither is always the faster one:

- *one client*: a single process makes both calls, for every sample a put and a get;
- *two clients*: a producer and a consumer in processes of their own, as with ours.

Each once *one at a time*, every call awaited before the next, and once with *64 outstanding*: 64 calls of a client in flight.

Ours. Producer, broker and consumer are three processes, on uvloop as the services are. The application calls `send([sample])`
once per sample, from as many coroutines as the rollouter has trajectories in flight by default (rollout.max_concurrent); how many
samples then share a socket write is the client's business, and no call carries more than one. The consumer takes what is there,
decodes and settles it. The baseline sends the same bytes over and over, which nobody encodes or decodes; ours sends trajectories
with ids of their own and the same arrays, each encoded and decoded by itself. The one figure of ours, many coroutines
at once, stands against all four baselines; for information, `awaited` is our rate when each `send` is awaited before the next.
A rate counts from the first send or put to the moment when the consumer has the last sample. The garbage collector is set as
services set it, in every process of both sides.

Durable (`queue.durability`): the broker writes every sample to its journal before its sender hears of the acceptance, and settles
it there when the consumer does; `process` and `power` stand against the faster baseline with 64 outstanding. Groups of 5 MB, a
message each, must pass at so many megabytes per second under `process`; `power` is told beside it, for it measures the disk.

Checked in every run of ours: all samples arrive, each once, in order, and the topic never held more than its capacity.
Each figure is the best of several rounds, ours and the baselines taken in turn, so that a noisy neighbour hits all of them.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and __spec__ is None:  # run as a file, not with -m
    sys.path.pop(0)  # this file's name is that of a standard module: its folder must leave the path before all imports

import asyncio
import collections
import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import ray
import uvloop

from asyncrl.clock import SystemClock
from asyncrl.cluster.host import GARBAGE_OBJECTS
from asyncrl.errors import StreamClosed
from asyncrl.ledger.store import FILE_NAME, LedgerWriter
from asyncrl.messages import Trajectory, TrajectoryId
from asyncrl.transport.broker import Broker
from asyncrl.transport.client import QueueReceiver, QueueSender
from asyncrl.transport.envelopes import pack
from asyncrl.transport.exchange import Exchange, NoHooks
from asyncrl.transport.journal import SegmentJournal
from asyncrl.transport.journal.segments import Segments
from asyncrl.transport.topic import TopicSpec

SAMPLE_BYTES = 8192
OUTSTANDING = 64
CONCURRENT = 256
CAPACITY = 256
ROUNDS = 3
SAMPLES = 40_000
AWAITED_SAMPLES = 3_000
RAY_SAMPLES = {1: 600, OUTSTANDING: 2_500}
LIMITS = {1: 15.0, OUTSTANDING: 10.0}
NAMES = {1: "one_at_a_time", OUTSTANDING: "64_outstanding"}
DURABLE_LIMITS = {"process": 7.0, "power": 3.0}
GROUP_BYTES = 5_000_000
GROUPS = 120
GROUP_CONCURRENT = 8
GROUP_MEGABYTES_PER_SECOND = 100.0
TIMEOUT = 120.0


def samples(count: int, size: int) -> list[Trajectory]:
    """Trajectories that take about `size` bytes each on the wire, as single-turn rollouts would make them."""
    num_tokens = (size - 240) // 13
    arrays = (
        np.arange(num_tokens, dtype=np.int32),
        np.ones(num_tokens, dtype=np.bool_),
        np.zeros(num_tokens, dtype=np.float32),
        np.zeros(num_tokens, dtype=np.int32),
    )
    return [sample(number, *arrays) for number in range(count)]


def sample(number: int, tokens: Any, loss_mask: Any, log_probs: Any, versions: Any) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(0, number, 0, 0),
        group_size=8,
        start_version=0,
        prompt_tokens=tokens[:8],
        response_tokens=tokens,
        loss_mask=loss_mask,
        log_probs=log_probs,
        versions=versions,
        finish_reason="stop",
        prompt="1+2=",
        response="3",
        ground_truth="3",
    )


def collect_less() -> None:
    """As the host of every service does once the service has started."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)


# ── the baselines ────────────────────────────────────────────────────────────────────────────────────────────────────────


@ray.remote(num_cpus=0)
class DequeActor:
    """The queue that one would write first."""

    def __init__(self) -> None:
        self._items: collections.deque[bytes] = collections.deque()
        collect_less()

    def put(self, item: bytes) -> None:
        self._items.append(item)

    def get(self) -> bytes | None:
        return self._items.popleft() if self._items else None


def one_client_rate(outstanding: int) -> float:
    """Samples per second through the actor when one client makes both calls."""
    queue, item = DequeActor.remote(), os.urandom(SAMPLE_BYTES)

    def pass_through(count: int) -> float:
        waiting: collections.deque = collections.deque()
        began = time.perf_counter()
        for _ in range(count):
            for call in (lambda: queue.put.remote(item), queue.get.remote):
                if len(waiting) == outstanding:
                    ray.get(waiting.popleft(), timeout=TIMEOUT)
                waiting.append(call())
        ray.get(list(waiting), timeout=TIMEOUT)
        return count / (time.perf_counter() - began)

    pass_through(OUTSTANDING)  # starts, connects and warms
    rate = pass_through(RAY_SAMPLES[outstanding])
    ray.kill(queue)
    return rate


@ray.remote(num_cpus=0)
class Producer:
    def __init__(self) -> None:
        collect_less()

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
    def __init__(self) -> None:
        collect_less()

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


def two_clients_rate(outstanding: int) -> float:
    """Samples per second through the actor when a producer puts and a consumer gets."""
    queue, producer, consumer = DequeActor.remote(), Producer.remote(), Consumer.remote()
    for count in (OUTSTANDING, RAY_SAMPLES[outstanding]):  # the first round starts, connects and warms
        calls = [end.run.remote(queue, count, outstanding) for end in (producer, consumer)]
        began, ended = ray.get(calls, timeout=TIMEOUT)
    for actor in (queue, producer, consumer):
        ray.kill(actor)
    return count / (ended - began)


# ── ours ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Flushing(NoHooks):
    """What the journal has for the ledger's file stands before anybody is told."""

    def __init__(self, writer: LedgerWriter):
        self._writer = writer

    def commit(self) -> None:
        self._writer.flush()


def durable(durability: str, folder: Path) -> dict[str, Any]:
    """Hooks and journal of an exchange, as the message_queue service has them."""
    power = durability == "power"
    writer = LedgerWriter(folder / FILE_NAME, power=power)
    return {"hooks": Flushing(writer), "journal": SegmentJournal(Segments(folder / "journal", power=power), writer.journal)}


def broker_process(pipe: Connection, capacity_bytes: int, durability: str, folder: str) -> None:
    """Serve until told to stop, then report the topic's figures."""

    collect_less()

    async def serve() -> None:
        parts = durable(durability, Path(folder)) if durability != "none" else {}
        exchange = Exchange([TopicSpec("rollouts", CAPACITY, capacity_bytes, ("producer",))], lease_seconds=30.0, **parts)
        broker = Broker(exchange, clock=SystemClock())
        pipe.send(await broker.start())
        while not pipe.poll():  # noqa: ASYNC110 (the pipe has no asyncio event)
            await asyncio.sleep(0.05)
        pipe.send(broker.stats()["rollouts"])
        await broker.close()

    uvloop.run(serve())


def consumer_process(pipe: Connection, address: str) -> None:
    """Take until the stream ends; report when the last sample was there, and every id in the order it came."""

    collect_less()

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


def heard(pipe: Connection) -> Any:
    """What the process at the other end says."""
    if not pipe.poll(TIMEOUT):
        raise TimeoutError(f"a process of the benchmark said nothing for {TIMEOUT:g} s: see its error above")
    return pipe.recv()


def our_rate(
    count: int, outstanding: int, *, durability: str = "none", sample_bytes: int = SAMPLE_BYTES, capacity: int = CAPACITY
) -> tuple[float, bool]:
    """Samples per second through the broker, and whether nothing was lost, doubled or reordered and the bound held."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-queue-") as folder:
        return through_broker(samples(count, sample_bytes), outstanding, durability, folder, capacity)


def through_broker(
    messages: list[Trajectory], outstanding: int, durability: str, folder: str, capacity: int
) -> tuple[float, bool]:
    count = len(messages)
    collect_less()
    capacity_bytes = capacity * len(pack(messages[0]).payload)
    context = multiprocessing.get_context("spawn")
    broker_pipe, broker_end = context.Pipe()
    broker = context.Process(target=broker_process, args=(broker_end, capacity_bytes, durability, folder))
    broker.start()
    address = heard(broker_pipe)
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
    last, rows = heard(consumer_pipe)
    broker_pipe.send(None)
    figures = heard(broker_pipe)
    for process in (consumer, broker):
        process.join(TIMEOUT)
    intact = rows == list(range(count)) and figures["accepted"] == figures["settled"] == count
    bounded = figures["max_depth"] <= CAPACITY and figures["max_bytes"] <= capacity_bytes
    return (count - 1) / (last - began), intact and bounded


BASELINES: dict[str, Callable[[int], float]] = {"one_client": one_client_rate, "two_clients": two_clients_rate}


def main() -> int:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ours, intact = 0.0, True
    kept = dict.fromkeys(DURABLE_LIMITS, 0.0)
    groups = dict.fromkeys(DURABLE_LIMITS, 0.0)
    best = {(client, outstanding): 0.0 for client in BASELINES for outstanding in RAY_SAMPLES}
    for _ in range(ROUNDS):
        rate, right = our_rate(SAMPLES, CONCURRENT)
        ours, intact = max(ours, rate), intact and right
        for durability in DURABLE_LIMITS:
            rate, right = our_rate(SAMPLES, CONCURRENT, durability=durability)
            kept[durability], intact = max(kept[durability], rate), intact and right
            rate, right = our_rate(GROUPS, GROUP_CONCURRENT, durability=durability, sample_bytes=GROUP_BYTES, capacity=8)
            groups[durability], intact = max(groups[durability], rate * GROUP_BYTES / 1e6), intact and right
        for client, outstanding in best:
            best[client, outstanding] = max(best[client, outstanding], BASELINES[client](outstanding))
        baselines = ", ".join(f"{client} {outstanding}: {rate:,.0f}" for (client, outstanding), rate in best.items())
        told = ", ".join(f"{durability} {kept[durability]:,.0f}/s, {groups[durability]:,.0f} MB/s" for durability in kept)
        print(f"ours {ours:,.0f}/s; durable: {told}; baselines by client and calls outstanding: {baselines}/s")
    awaited, right = our_rate(AWAITED_SAMPLES, 1)
    intact = intact and right
    ray.shutdown()
    checks = [
        check(f"{client}_{NAMES[outstanding]}", ours, rate, LIMITS[outstanding]) for (client, outstanding), rate in best.items()
    ]
    fastest = max(rate for (_, outstanding), rate in best.items() if outstanding == OUTSTANDING)
    checks += [check(f"durable_{name}", kept[name], fastest, limit) for name, limit in DURABLE_LIMITS.items()]
    checks.append(check("durable_process_5mb_groups_mb_s", groups["process"], GROUP_MEGABYTES_PER_SECOND, 1.0))
    ok = intact and all(each["ok"] for each in checks)
    closest = min(checks, key=lambda each: each["ratio"] / each["limit"])
    result = {
        "name": "queue",
        **{key: closest[key] for key in ("ratio", "ours", "baseline", "limit")},
        "ok": ok,
        "checks": checks,
    }
    result |= {"nothing_lost_doubled_or_reordered_and_bound_held": intact, "awaited": round(awaited)}
    result["durable_power_5mb_groups_mb_s"] = round(groups["power"])
    print(json.dumps(result))
    return 0 if ok else 1


def check(name: str, ours: float, baseline: float, limit: float) -> dict:
    ratio = round(ours / baseline, 2)
    return {"name": name, "ratio": ratio, "ours": round(ours), "baseline": round(baseline), "limit": limit, "ok": ratio >= limit}


if __name__ == "__main__":
    sys.exit(main())
