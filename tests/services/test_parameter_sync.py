"""ParameterSync under faults: silence, restarts, damage, slow servers, a trainer that starts again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from asyncrl.clock import SystemClock
from asyncrl.errors import PlanMismatch
from asyncrl.services.parameter_sync.service import ParameterSyncService, SyncSettings
from asyncrl.simulation.weights import SimulatedSync
from asyncrl.weight_sync.receiver import WeightReceiver
from tests.services.weight_fleets import NAME, RealFace
from tests.waiting import until
from tests.weight_sync.stand_in import StandInTarget, a_model

A, B = "inference/0", "inference/1"
QUICK = SyncSettings(heartbeat_seconds=0.02, silence_seconds=0.2, timeout_seconds=5.0)


@pytest.fixture
async def two() -> AsyncIterator[SimulatedSync]:
    """Two simulated servers that confirmed version 0, and a publisher at `two.trainer`."""
    sync = SimulatedSync(SystemClock(), servers=(A, B), settings=QUICK)
    await sync.start()
    sync.trainer = sync.publisher()  # type: ignore[attr-defined]
    sync.trainer.register()
    publish(sync, 0)
    await until(lambda: states(sync.service) == {A: "READY", B: "READY"})
    yield sync
    for name in (A, B):
        sync.let_go(name)
    await sync.close()


def publish(sync: SimulatedSync, version: int) -> None:
    sync.trainer.stage(version, sync.trainer.acquire(version))  # type: ignore[attr-defined]


def states(service: ParameterSyncService) -> dict[str, str]:
    return dict(service.status()["servers"])


async def test_a_silent_server_is_dead_and_comes_back_current(two):
    two.receivers[B].silent = True
    await until(lambda: states(two.service)[B] == "DEAD")
    publish(two, 1)
    await until(lambda: two.service.status()["version"] == 1)
    assert "silent for" in two.service.status()["reasons"][B]
    two.receivers[B].silent = False
    await until(lambda: states(two.service) == {A: "READY", B: "READY"})
    assert two.receivers[B].live == (1, 1)


async def test_a_server_past_its_deadline_is_stale_and_the_others_go_on():
    sync = SimulatedSync(SystemClock(), servers=(A, B), settings=replace(QUICK, timeout_seconds=0.3))
    await sync.start()
    sync.trainer = sync.publisher()
    sync.trainer.register()
    publish(sync, 0)
    await until(lambda: states(sync.service) == {A: "READY", B: "READY"})
    sync.hold(B)
    publish(sync, 1)
    await until(lambda: states(sync.service) == {A: "READY", B: "STALE"})
    assert "within 0.3 s" in sync.service.status()["reasons"][B]
    publish(sync, 2)
    await until(lambda: sync.service.status()["version"] == 2)
    assert states(sync.service)[B] == "STALE"
    sync.let_go(B)
    await until(lambda: states(sync.service) == {A: "READY", B: "READY"})
    assert sync.service.summary()["sync"]["failed_updates"] >= 1
    await sync.close()


async def test_slices_that_arrive_wrong_are_counted_and_leave_verified_true_once_sent_again(two):
    two.receivers[A].corrupt_next = 3
    two.hold(A)
    publish(two, 1)
    await until(lambda: states(two.service)[A] == "STALE")
    two.let_go(A)
    await until(lambda: states(two.service)[A] == "READY")
    figures = two.service.summary()["sync"]
    assert (figures["refused_slices"], figures["verified"]) == (3, True)


async def test_verified_is_false_when_nobody_asked_for_the_digest():
    sync = SimulatedSync(SystemClock(), settings=replace(QUICK, verify=False))
    await sync.start()
    sync.trainer = sync.publisher()
    sync.trainer.register()
    publish(sync, 0)
    await until(lambda: states(sync.service) == {A: "READY"})
    assert sync.service.summary()["sync"]["verified"] is False
    await sync.close()


async def test_version_0_is_published_and_not_counted(two):
    assert two.service.summary()["sync"]["count"] == 0
    assert two.service.summary()["sync"]["verified"] is True
    publish(two, 1)
    await until(lambda: two.service.status()["version"] == 1)
    assert two.service.summary()["sync"]["count"] == 1


async def test_a_trainer_that_starts_again_calls_off_what_is_under_way(two):
    two.hold(A)
    publish(two, 1)
    await until(lambda: two.service.status()["published"] == 1)
    two.trainer = two.publisher(incarnation=2)
    two.trainer.register()
    assert states(two.service) == {A: "STALE", B: "STALE"}
    two.let_go(A)
    publish(two, 0)
    await until(lambda: states(two.service) == {A: "READY", B: "READY"})
    assert two.receivers[A].live == two.receivers[B].live == (2, 0)


async def test_a_server_that_joins_late_or_anew_is_brought_up_to_date(two):
    publish(two, 1)
    await until(lambda: two.service.status()["version"] == 1)
    two.receivers[B].restart()
    await two.service.add_server(B, "http://new", B)
    assert states(two.service)[B] == "STALE"
    await until(lambda: states(two.service)[B] == "READY")
    assert two.receivers[B].live == (1, 1)


async def test_a_server_whose_process_ends_leaves_traffic_at_once_and_holds_nobody_up():
    face, second = RealFace(replace(QUICK, silence_seconds=60.0)), StandInTarget(a_model())
    receiver = WeightReceiver(second)
    await face.start()
    await face.service.add_server(B, "", receiver.start())
    publisher = face.publisher()
    await face.call(publisher.register)
    await face.call(publisher.stage, 0, await face.call(publisher.acquire, 0))
    await until(lambda: states(face.service) == {A: "READY", B: "READY"})
    second.gate.clear()  # it has version 1 half taken in when it ends
    await face.call(publisher.stage, 1, await face.call(publisher.acquire, 1))
    await until(lambda: states(face.service) == {A: "READY", B: "UPDATING"})
    assert face.service.status()["version"] == 0
    second.gate.set()
    await asyncio.to_thread(receiver.close)
    await until(lambda: states(face.service) == {A: "READY", B: "STALE"}, 5)
    assert face.service.status()["version"] == 1
    await face.call(publisher.stage, 2, await face.call(publisher.acquire, 2))
    await until(lambda: face.service.status()["version"] == 2, 5)
    await face.close()


async def test_a_line_that_broke_costs_no_transfer_when_the_same_process_is_there_again():
    face = RealFace(QUICK)
    await face.start()
    publisher = face.publisher()
    await face.call(publisher.register)
    await face.call(publisher.stage, 0, await face.call(publisher.acquire, 0))
    assert await face.call(publisher.wait_confirmed, 0, 10)
    face.service._on_lost(NAME, face.service._lines[NAME])
    assert states(face.service) == {NAME: "STALE"}
    assert face.service.status()["reasons"][NAME] == "its connection broke"
    await until(lambda: states(face.service) == {NAME: "READY"})
    assert face.target.commits == [(1, 0)]
    await face.close()


async def test_a_server_taken_out_while_it_is_updated_confirms_what_is_under_way_and_gets_nothing_after_it(two):
    two.hold(A)
    publish(two, 1)
    await until(lambda: two.service._lines[A].update is not None)
    leaving = asyncio.create_task(two.service.retire_server(A))
    await until(lambda: states(two.service)[A] == "RETIRED")
    publish(two, 2)
    two.let_go(A)
    await leaving
    await until(lambda: two.receivers[B].live == (1, 2))
    assert two.receivers[A].live == (1, 1)
    summary = two.service.summary()["sync"]
    assert (summary["verified"], summary["unanswered"]) == (True, 0)


async def test_a_server_taken_out_that_never_ends_its_update_holds_nobody_up(two, monkeypatch):
    monkeypatch.setattr("asyncrl.services.parameter_sync.service.RETIRE_SECONDS", 0.2)
    two.hold(A)
    publish(two, 1)
    await until(lambda: two.service._lines[A].update is not None)
    async with asyncio.timeout(2):
        await two.service.retire_server(A)
    for version in (2, 3, 4):
        publish(two, version)
        await until(lambda version=version: two.receivers[B].live == (1, version))
    assert two.receivers[A].live == (1, 0)


async def test_stopping_while_a_server_is_updated_ends_at_once(two):
    two.hold(A)
    publish(two, 1)
    await until(lambda: two.service.status()["published"] == 1)
    async with asyncio.timeout(2):
        await two.close()


@pytest.mark.parametrize("transport", ["shared_memory", "zeromq"])
async def test_a_byte_flipped_in_the_slot_is_refused_made_good_and_verified(transport):
    face = RealFace(replace(QUICK, transport=transport, bucket_bytes=600))
    await face.start()
    publisher = face.publisher()
    await face.call(publisher.register)
    await face.call(publisher.stage, 0, await face.call(publisher.acquire, 0))
    assert await face.call(publisher.wait_confirmed, 0, 10)

    slot = await face.call(publisher.acquire, 1)
    memory = publisher._slots[slot].memory
    checksums = publisher._checksums
    publisher._checksums = lambda number: (checksums(number), memory.__setitem__(7, memory[7] ^ 1))[0]
    await face.call(publisher.stage, 1, slot)
    await until(lambda: states(face.service)[NAME] == "STALE")
    assert face.target.commits == [(1, 0)]
    await until(lambda: face.service.summary()["sync"]["failed_updates"] >= 1)
    assert face.target.commits == [(1, 0)]
    memory[7] ^= 1
    await until(lambda: states(face.service)[NAME] == "READY")
    assert face.target.commits == [(1, 0), (1, 1)]
    assert face.target.holds(face.model)
    figures = face.service.summary()["sync"]
    assert figures["refused_slices"] >= 4
    assert figures["verified"] is True
    await face.close()


async def test_live_weights_that_are_not_those_published_make_verified_false_for_good():
    face = RealFace(QUICK)
    await face.start()
    publisher = face.publisher()
    await face.call(publisher.register)
    face.target.spoil = True
    await face.call(publisher.stage, 0, await face.call(publisher.acquire, 0))
    await until(lambda: states(face.service)[NAME] == "STALE")
    assert "slices of the live parameters differ" in face.service.status()["reasons"][NAME]
    face.target.spoil = False
    await until(lambda: states(face.service)[NAME] == "READY")
    assert face.service.summary()["sync"]["verified"] is False
    await face.close()


async def test_a_slow_reader_keeps_its_slot_while_newer_versions_use_the_other():
    face = RealFace(replace(QUICK, bucket_bytes=600, bytes_per_second=8_000.0))
    await face.start()
    publisher = face.publisher()
    await face.call(publisher.register)
    for version in range(6):
        for tensor in face.model.values():
            tensor.add_(1.0)
        await face.call(publisher.stage, version, await face.call(publisher.acquire, version))
    assert await face.call(publisher.wait_confirmed, 5, 20)
    assert face.target.holds(face.model)
    figures = face.service.summary()["sync"]
    assert figures["skipped"] >= 2
    assert (figures["refused_slices"], figures["verified"]) == (0, True)
    await face.close()


async def test_two_real_servers_hold_the_same_version():
    face, second = RealFace(QUICK), StandInTarget(a_model())
    receiver = WeightReceiver(second)
    await face.start()
    await face.service.add_server(B, "", receiver.start())
    publisher = face.publisher()
    await face.call(publisher.register)
    await face.call(publisher.stage, 0, await face.call(publisher.acquire, 0))
    await until(lambda: states(face.service) == {A: "READY", B: "READY"})
    assert face.target.holds(face.model)
    assert second.holds(face.model)
    await face.close()
    receiver.close()


def test_plans_of_ranks_that_do_not_fit_are_refused_at_registration():
    sync = SimulatedSync(SystemClock(), settings=QUICK)
    sync.publisher(rank=0, world_size=2).register()
    other = {"rank": 1, "world_size": 2, "tensors": [["other", [4], "float32"]], "placements": [""], "slices": []}
    with pytest.raises(PlanMismatch, match="ranks 0 and 1 must hold the same tensors"):
        sync.service.register(1, 2, 1, {**other, "shard_offsets": [None], "slot_bytes": 0}, ["a", "b"])
