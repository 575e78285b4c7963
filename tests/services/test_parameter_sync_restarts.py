"""ParameterSync, killed and started again at its address, with trainer and servers alive; and a trainer started again."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from asyncrl.errors import DeadlineExceeded, RemoteError
from asyncrl.protocols.weights import FleetView
from asyncrl.services.parameter_sync.service import SyncSettings
from asyncrl.weight_sync.fleet_client import RpcFleet
from asyncrl.weight_sync.publisher import ShmPublisher
from asyncrl.weight_sync.receiver import WeightReceiver
from asyncrl.weight_sync.slots import SHARED_MEMORY
from tests.services.weight_fleets import NAME, RealFace
from tests.waiting import until
from tests.weight_sync.stand_in import StandInTarget, a_model

SETTINGS = SyncSettings(heartbeat_seconds=0.02, silence_seconds=0.5, timeout_seconds=10.0, bucket_bytes=600)


@pytest.fixture
async def face(monkeypatch) -> AsyncIterator[RealFace]:
    monkeypatch.setattr("asyncrl.weight_sync.publisher._TRY_SECONDS", 0.3)
    monkeypatch.setattr("asyncrl.weight_sync.publisher._POLL_SECONDS", 0.1)
    monkeypatch.setattr("asyncrl.weight_sync.fleet_client._POLL_SECONDS", 0.1)
    monkeypatch.setattr("asyncrl.weight_sync.fleet_client._LATE_SECONDS", 0.3)
    face = RealFace(SETTINGS)
    await face.start()
    yield face
    await face.close()


async def registered(face: RealFace, incarnation: int = 1) -> ShmPublisher:
    publisher = face.publisher(incarnation)
    await face.call(publisher.register)
    return publisher


async def publish(face: RealFace, publisher: ShmPublisher, version: int) -> None:
    for tensor in face.model.values():
        tensor.add_(1.0)
    await face.call(publisher.stage, version, await face.call(publisher.acquire, version))


async def see(fleet: RpcFleet, holds: Callable[[FleetView], bool], since: int = -1) -> FleetView:
    async with asyncio.timeout(20):
        while True:
            view = await fleet.watch(since, 5.0)
            if holds(view):
                return view
            since = view.seq


async def confirmed(face: RealFace, publisher: ShmPublisher, version: int) -> None:
    assert await face.call(publisher.wait_confirmed, version, 15.0)


async def test_servers_that_hold_the_current_version_are_not_updated_again(face):
    publisher = await registered(face)
    for version in (0, 1):
        await publish(face, publisher, version)
        await confirmed(face, publisher, version)
    received = face.receiver._executor.status()["received_bytes"]
    await face.lose_service()
    await face.start_service_again()
    await face.call(publisher.reannounce)
    view = await see(face.fleet, lambda view: view.confirmed == 1)
    assert (view.incarnation, view.published, view.servers[0].state) == (1, 1, "READY")
    assert face.target.commits == [(1, 0), (1, 1)]
    assert face.receiver._executor.status()["received_bytes"] == received
    assert face.service.summary()["sync"]["verified"] is True


async def test_a_live_version_whose_digest_was_never_taken_is_sent_again(face):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await confirmed(face, publisher, 0)
    face.receiver._executor._digest_of_live = None  # as if the service had been lost between COMMIT and DIGEST
    await face.lose_service()
    await face.start_service_again()
    await face.call(publisher.reannounce)
    await confirmed(face, publisher, 0)
    assert face.target.commits == [(1, 0), (1, 0)]


async def test_live_weights_that_are_not_those_in_the_slots_are_replaced(face):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await confirmed(face, publisher, 0)
    face.receiver._executor._digest_of_live = ((1, 0), "something else")
    await face.lose_service()
    await face.start_service_again()
    await face.call(publisher.reannounce)
    await confirmed(face, publisher, 0)
    assert face.target.commits == [(1, 0), (1, 0)]
    assert face.target.holds(face.model)


async def test_a_watcher_sees_the_views_of_a_new_session_whatever_their_number(face):
    publisher = await registered(face)
    for version in range(6):
        await publish(face, publisher, version)
        await confirmed(face, publisher, version)
    before = await face.fleet.watch(-1, 1.0)
    watching = asyncio.create_task(see(face.fleet, lambda view: view.seq < before.seq, before.seq))
    await face.lose_service()
    await face.start_service_again()
    view = await watching
    assert (view.incarnation, view.confirmed) == (-1, None)
    await face.call(publisher.reannounce)
    await see(face.fleet, lambda view: view.confirmed == 5, view.seq)


async def test_a_publisher_that_nobody_asks_says_what_it_has_when_it_is_not_known(face):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await face.lose_service()
    await face.start_service_again()
    await publish(face, publisher, 1)
    await confirmed(face, publisher, 1)
    assert face.target.holds(face.model)


@pytest.mark.parametrize("moment", ["acquired", "written", "announced", "waiting"])
async def test_a_trainer_that_publishes_when_the_service_is_lost_notices_nothing(face, moment):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await confirmed(face, publisher, 0)
    await publish(face, publisher, 1)
    await confirmed(face, publisher, 1)
    for tensor in face.model.values():
        tensor.add_(1.0)
    going_on = threading.Event()
    match moment:
        case "acquired":
            slot = await face.call(publisher.acquire, 2)
            await face.lose_service()
        case "written":
            slot = await face.call(publisher.acquire, 2)
            checksums = publisher._checksums
            publisher._checksums = lambda number: (going_on.wait(10), checksums(number))[1]
            await face.call(publisher.stage, 2, slot)
            await face.lose_service()
        case "announced":
            slot = await face.call(publisher.acquire, 2)
            await face.lose_service()
            await face.call(publisher.stage, 2, slot)
        case "waiting":
            await face.lose_service()
            waiting = asyncio.create_task(face.call(publisher.acquire, 2))
            await asyncio.sleep(0.05)
    await face.start_service_again()
    asking = asyncio.create_task(face.call(publisher.reannounce))
    going_on.set()
    if moment == "waiting":
        slot = await waiting
    if moment in ("acquired", "waiting"):
        await face.call(publisher.stage, 2, slot)
    await asking
    await confirmed(face, publisher, 2)
    assert face.target.holds(face.model)
    assert face.service.summary()["sync"]["refused_slices"] == 0


async def test_a_slot_that_a_server_read_when_the_service_was_lost_is_free_again(face):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await confirmed(face, publisher, 0)
    face.hold()
    await publish(face, publisher, 1)
    await until(lambda: face.receiver._executor.status()["begun"] is None)
    await face.lose_service()
    await face.start_service_again()
    await face.call(publisher.reannounce)
    for version in (2, 3, 4):
        await publish(face, publisher, version)
    face.let_go()
    await confirmed(face, publisher, 4)
    assert face.target.holds(face.model)


async def test_a_server_started_again_while_the_service_is_away_is_sent_everything(face):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await confirmed(face, publisher, 0)
    await face.lose_service()
    await face.restart()
    await face.start_service_again()
    await face.call(publisher.reannounce)
    await confirmed(face, publisher, 0)
    assert face.target.commits == [(1, 0)]
    assert face.target.holds(face.model)


async def test_two_ranks_that_stand_at_different_versions_agree_on_what_both_have(face):
    ranks = [
        ShmPublisher(
            [("weight", torch.full((4, 4), float(rank)))], run_id=f"{face.run_id}w", address=face.address, incarnation=1,
            bucket_bytes=600, timeout_seconds=20, rank=rank, world_size=2,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    face.publishers += ranks
    for rank in ranks:
        await face.call(rank.register)
    slot = await face.call(ranks[0].acquire, 0)
    for rank in ranks:
        await face.call(rank.stage, 0, slot)
    await until(lambda: face.service.status()["published"] == 0)
    slot = await face.call(ranks[0].acquire, 1)
    await face.call(ranks[0].stage, 1, slot)
    await face.lose_service()
    await face.start_service_again()
    await asyncio.gather(*(face.call(rank.reannounce) for rank in ranks))
    assert face.service.status()["published"] == 0
    await face.call(ranks[1].stage, 1, slot)
    await until(lambda: face.service.status()["published"] == 1)


async def test_a_trainer_started_again_takes_over_whatever_the_old_one_says(face):
    old = await registered(face, incarnation=1)
    await publish(face, old, 5)
    await confirmed(face, old, 5)
    slots = {path.name: path.stat().st_ino for path in SHARED_MEMORY.glob(f"asyncrl-{face.run_id}-*")}
    new = await registered(face, incarnation=2)
    again = {path.name: path.stat().st_ino for path in SHARED_MEMORY.glob(f"asyncrl-{face.run_id}-*")}
    assert again.keys() == slots.keys()
    assert all(again[name] != slots[name] for name in slots)
    view = await see(face.fleet, lambda view: view.incarnation == 2)
    assert (view.confirmed, view.servers[0].state) == (None, "STALE")
    await publish(face, new, 3)
    await confirmed(face, new, 3)
    for late in (lambda: old.acquire(6), old.reannounce, lambda: old.wait_confirmed(5, 0.1)):
        with pytest.raises(RemoteError, match="incarnation 1 of the trainer is over, 2 has begun"):
            await face.call(late)
    await face.lose_service()
    await face.start_service_again()
    await until(lambda: face.service._fleet._newest_seen == 2)
    with pytest.raises(RemoteError, match="incarnation 1 of the trainer is over, 2 has begun"):
        await face.call(old.reannounce)
    await face.call(new.reannounce)
    await confirmed(face, new, 3)
    assert face.target.commits == [(1, 5), (2, 3)]


async def test_a_service_that_does_not_come_back_is_named_by_a_deadline(face):
    publisher = ShmPublisher(
        face.model.items(), run_id=f"{face.run_id}x", address=face.address, incarnation=1, bucket_bytes=600, timeout_seconds=0.5
    )
    face.publishers.append(publisher)
    await face.call(publisher.register)
    await face.lose_service()
    with pytest.raises(DeadlineExceeded, match=r"acquire_slot at tcp://.* was not answered within 0.5 s \(sync.timeout_sec"):
        await face.call(publisher.acquire, 0)
    await face.start_service_again()


# ---- its process, killed


PROCESS = """
import asyncio, json, sys
from asyncrl.clock import SystemClock
from asyncrl.services.parameter_sync.service import ParameterSyncService, SyncSettings
from asyncrl.weight_sync.channel import staged_line

async def main():
    settings = SyncSettings(heartbeat_seconds=0.02, silence_seconds=2, timeout_seconds=20, bucket_bytes=600)
    service = ParameterSyncService(settings, connect=staged_line, clock=SystemClock())
    earlier = {"rpc": sys.argv[2]} if sys.argv[2] else {}
    print((await service.start(earlier))["rpc"], flush=True)
    await service.run(json.loads(sys.argv[1]))

asyncio.run(main())
"""


def start_process(book: dict, address: str = "") -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", PROCESS, json.dumps(book), address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


async def test_its_process_killed_again_and_again_while_versions_go_out():
    model = a_model(seed=1)
    target = StandInTarget(model)
    receiver = WeightReceiver(target)
    book = {NAME: {"http": "http://a", "weights": receiver.start()}}
    process, address = await asyncio.to_thread(start_process, book)
    publisher = ShmPublisher(model.items(), run_id="kills", address=address, incarnation=1, bucket_bytes=600, timeout_seconds=30)
    fleet = RpcFleet(address)
    try:
        await asyncio.to_thread(publisher.register)
        for version in range(12):
            for tensor in model.values():
                tensor.add_(1.0)
            await asyncio.to_thread(publisher.stage, version, await asyncio.to_thread(publisher.acquire, version))
            if version % 4 == 2:
                process.kill()
                await asyncio.to_thread(process.communicate)
                process, again = await asyncio.to_thread(start_process, book, address)
                assert again == address
                await asyncio.to_thread(publisher.reannounce)
        assert await asyncio.to_thread(publisher.wait_confirmed, 11, 30.0)
        view = await see(fleet, lambda view: view.confirmed == 11)
        assert view.servers[0].state == "READY"
        assert target.holds(model)
    finally:
        await asyncio.to_thread(publisher.close)
        process.kill()
        await asyncio.to_thread(process.communicate)
        await fleet.close()
        receiver.close()
