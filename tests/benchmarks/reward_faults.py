"""Scoring in spite of a reward that hangs and raises: a share of calls hangs until reward.timeout_seconds, another raises.

One front and its workers score whole groups, with the real executors: a child process per worker runs `faulty_reward`, is
killed when it hangs, and replaced. Each group's members are dealt by lot, so that every group can be checked member by member.
The limit of the rate is 0.8·workers / (h·T + (1 − h)·t): T the time limit, h the share that hangs, t what any other call takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.clock import SystemClock
from asyncrl.errors import StreamClosed
from asyncrl.messages import GroupId, ScoredGroup, Trajectory
from asyncrl.protocols import Delivery, End
from asyncrl.rewards import FunctionSpec
from asyncrl.rewards.executor import FunctionExecutor
from asyncrl.services.reward import FrontParts, RewardFront, RewardWorker

SHARE_OF_THE_LIMIT = 0.8
GROUP_SIZE = 8
KINDS = {"hang": "faulty: timeout after {limit:g} s", "raise": "faulty: raised ValueError: not today", "ok": None}
DEADLINE_SECONDS = 600.0
FUNCTION_FILE = Path(__file__).resolve().with_name("faulty_reward.py")


@dataclass
class Everything:
    """Receiver, sender and ledger of the front: groups that are all there from the start, and what became of them."""

    waiting: list[Trajectory]
    scored: list[ScoredGroup] = field(default_factory=list)
    failed: list[End] = field(default_factory=list)

    async def receive(self, *, max_items: int, timeout: float) -> list[Delivery]:
        if not self.waiting:
            raise StreamClosed("the end of the data")
        taken, self.waiting = self.waiting[:max_items], self.waiting[max_items:]
        return [Delivery(trajectory) for trajectory in taken]

    async def settle(self, ids: Sequence[str]) -> None: ...

    async def send(self, messages: Sequence[Any]) -> None:
        self.scored += messages

    async def end(self, ends: Sequence[End]) -> None:
        self.failed += ends

    async def close(self) -> None: ...


def trajectory(row: int, member: int, response: str) -> Trajectory:
    """A response that says what scoring it does."""
    return Trajectory(
        id=GroupId(0, row, 0).member(member),
        group_size=GROUP_SIZE,
        start_version=0,
        prompt_tokens=np.array([1], np.int32),
        response_tokens=np.array([2], np.int32),
        loss_mask=np.array([True]),
        log_probs=np.array([-1.0], np.float32),
        versions=np.array([0], np.int32),
        finish_reason="stop",
        prompt="prompt",
        response=response,
        ground_truth=None,
        extra_info={},
    )


async def score(options: argparse.Namespace, trajectories: list[Trajectory]) -> tuple[Everything, RewardFront, float, int]:
    """What became of them, the front, the seconds from the first sample to the last score, and the workers alive then."""
    parts = Everything(trajectories)
    clock = SystemClock()
    front = RewardFront(
        lambda book: FrontParts(parts, parts, parts),  # type: ignore[arg-type]
        min_scored=2,
        limit_seconds=options.limit,
        num_functions=1,
        clock=clock,
    )
    spec = FunctionSpec.of("faulty", f"{FUNCTION_FILE}:faulty")
    workers = [
        RewardWorker(
            index, FunctionExecutor([spec], [1.0], limit_seconds=options.limit, concurrency=1), concurrency=1, clock=clock
        )
        for index in range(options.workers)
    ]
    book = {"reward": await front.start()}
    for worker in workers:
        await worker.start()
    began = time.monotonic()
    async with asyncio.TaskGroup() as services:
        running = [services.create_task(service.run(book)) for service in (front, *workers)]
        while front.status()["state"] != "drained":
            assert time.monotonic() - began < DEADLINE_SECONDS, front.status()
            assert not any(task.done() for task in running), "a service ended"
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - began
        alive = sum(not task.done() for task in running[1:])
        alive = min(alive, front.status()["workers"])
        for service in (front, *workers):
            await service.stop()
    return parts, front, seconds, alive


def wrong(parts: Everything, dealt: dict[int, list[str]], limit: float) -> list[str]:
    """What is not as the lot has it: members scored, failures by reason, groups."""
    found = []
    reasons = {kind: text.format(limit=limit) if text else None for kind, text in KINDS.items()}
    ends = {group.id.row: group.failures for group in parts.scored} | {end.id.row: None for end in parts.failed}
    for row, kinds in dealt.items():
        expected = [reasons[kind] for kind in kinds]
        too_few = expected.count(None) < 2
        if row not in ends or ends[row] != (None if too_few else expected):
            found.append(f"group {row}: {ends.get(row, 'no end')} instead of {'a failure' if too_few else expected}")
    if len(parts.scored) + len(parts.failed) != len(dealt):
        found.append(f"{len(parts.scored)} + {len(parts.failed)} groups of {len(dealt)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=2.0, help="T: the time limit of a call, seconds")
    parser.add_argument("--call", type=float, default=0.05, help="t: what a call takes that does not hang, seconds")
    parser.add_argument("--hangs", type=float, default=0.1, help="h: the share that hangs")
    parser.add_argument("--raises", type=float, default=0.1, help="the share that raises")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=40)
    options = parser.parse_args()
    number = options.groups * GROUP_SIZE
    hangs, raises = round(options.hangs * number), round(options.raises * number)
    lot = ["hang"] * hangs + ["raise"] * raises + ["ok"] * (number - hangs - raises)
    random.Random(0).shuffle(lot)
    dealt = {row: lot[row * GROUP_SIZE : (row + 1) * GROUP_SIZE] for row in range(options.groups)}
    trajectories = [
        trajectory(row, member, f"{kind}:{options.call}") for row, kinds in dealt.items() for member, kind in enumerate(kinds)
    ]
    parts, front, seconds, alive = asyncio.run(score(options, trajectories))
    faults = wrong(parts, dealt, options.limit)
    counted: dict[str, int] = front.summary()["scoring"]["reasons"]
    expected = Counter(text.format(limit=options.limit) for kind in lot if (text := KINDS[kind]))
    ideal = options.workers / (options.hangs * options.limit + (1 - options.hangs) * options.call)
    rate = number / seconds
    checks = {
        "rate": {"ours": round(rate, 3), "limit": round(SHARE_OF_THE_LIMIT * ideal, 3), "ok": rate >= SHARE_OF_THE_LIMIT * ideal},
        "workers_alive": {"ours": alive, "limit": options.workers, "ok": alive == options.workers},
        "groups_as_dealt": {"ours": len(faults), "limit": 0, "ok": not faults, "first": faults[:3]},
        "reasons": {"ours": counted, "limit": dict(expected), "ok": counted == expected},
    }
    report = {
        "name": "reward_faults",
        "ratio": round(rate / ideal, 3),
        "ours": round(rate, 3),
        "baseline": round(ideal, 3),
        "limit": SHARE_OF_THE_LIMIT,
        "ok": all(check["ok"] for check in checks.values()),
        "unit": "samples a second; the baseline is workers / (h·T + (1 − h)·t)",
        "samples": number,
        "checks": checks,
    }
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
