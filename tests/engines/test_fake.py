"""The fake fleet on virtual time: what it adds to the conformance suite of `test_client`."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from asyncrl.protocols import Completion, GenerateRequest, MemberRequest, SamplingParams
from asyncrl.simulation.inference import FakeInference
from asyncrl.simulation.loop import VirtualClock, run_virtual


def group(members: int = 2, max_new: int = 100, timeout: float = 1000.0) -> GenerateRequest:
    numbers = range(members)
    prompt = np.asarray([1, 2], np.int32)
    return GenerateRequest(prompt, tuple(MemberRequest(n, f"r{n}", n) for n in numbers), SamplingParams(max_new), timeout)


async def collect(engine: FakeInference, request: GenerateRequest) -> list[Completion]:
    return [completion async for completions in engine.generate(request) for completion in completions]


def test_tokens_carry_the_version_of_the_moment_they_appeared_and_hours_pass_at_once():
    async def scene() -> tuple[list[Completion], float]:
        clock = VirtualClock()
        engine = FakeInference(clock, token_seconds=60.0, num_tokens=lambda request, member: 100)
        began = clock.now()
        running = asyncio.create_task(collect(engine, group(timeout=1e6)))
        await asyncio.sleep(60.0 * 40 + 1)
        engine.set_version(7)
        return await running, clock.now() - began

    wall = time.monotonic()
    completions, seconds = run_virtual(scene())
    assert time.monotonic() - wall < 5
    assert abs(seconds - 6000) < 1
    assert [completion.versions.tolist() for completion in completions] == 2 * [40 * [0] + 60 * [7]]


def test_members_wait_their_turn_when_there_are_fewer_places():
    async def scene() -> float:
        clock = VirtualClock()
        engine = FakeInference(clock, token_seconds=1.0, num_tokens=lambda request, member: 10, max_running=2)
        began = clock.now()
        await collect(engine, group(members=6))
        return clock.now() - began

    assert abs(run_virtual(scene()) - 30) < 1


def test_a_member_can_be_made_to_fail():
    async def scene() -> list[Completion]:
        engine = FakeInference(VirtualClock(), failure=lambda member: "lost" if member.index == 1 else None)
        return await collect(engine, group())

    failures = {completion.index: completion.failure for completion in run_virtual(scene())}
    assert failures == {0: None, 1: "lost"}
