"""What every Fleet and every WeightPublisher does, real and simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from asyncrl.errors import RemoteError, StaleIncarnation, SyncError
from asyncrl.protocols.weights import FleetView, WeightPublisher
from asyncrl.services.parameter_sync.service import SyncSettings
from tests.services.weight_fleets import NAME, Face, RealFace, SimulatedFace

SETTINGS = SyncSettings(heartbeat_seconds=0.05, timeout_seconds=10, bucket_bytes=600)


@pytest.fixture(params=[RealFace, SimulatedFace])
async def face(request) -> AsyncIterator[Face]:
    face = request.param(SETTINGS)
    await face.start()
    yield face
    await face.close()


async def see(face: Face, holds: Callable[[FleetView], bool]) -> FleetView:
    """The first view that `holds`, watching as the rollouter does."""
    since = -1
    async with asyncio.timeout(20):
        while True:
            view = await face.fleet.watch(since, 5.0)
            if holds(view):
                return view
            since = view.seq


async def publish(face: Face, publisher: WeightPublisher, version: int) -> int:
    slot = await face.call(publisher.acquire, version)
    held = await face.call(publisher.stage, version, slot)
    assert held >= 0
    return int(slot)


async def registered(face: Face, incarnation: int = 1) -> WeightPublisher:
    publisher = face.publisher(incarnation)
    await face.call(publisher.register)
    return publisher


async def test_the_first_version_brings_a_server_into_traffic(face):
    view = await face.fleet.watch(-1, 5.0)
    assert (view.confirmed, [server.state for server in view.servers]) == (None, ["STARTING"])
    publisher = await registered(face)
    await publish(face, publisher, 0)
    view = await see(face, lambda view: view.confirmed == 0)
    assert (view.incarnation, view.published) == (1, 0)
    assert [(s.name, s.url, s.state, s.version) for s in view.servers] == [(NAME, f"http://{NAME}", "READY", 0)]


async def test_a_watch_without_a_change_answers_with_the_same_view_after_its_time(face):
    view = await face.fleet.watch(-1, 5.0)
    began = asyncio.get_running_loop().time()
    assert await face.fleet.watch(view.seq, 0.2) == view
    assert asyncio.get_running_loop().time() - began >= 0.19


async def test_a_server_takes_traffic_at_its_version_while_a_newer_one_is_on_its_way(face):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await see(face, lambda view: view.confirmed == 0)
    face.hold()
    await publish(face, publisher, 1)
    view = await see(face, lambda view: view.published == 1)
    assert (view.confirmed, view.servers[0].state, view.servers[0].takes_traffic) == (0, "UPDATING", True)
    face.let_go()
    view = await see(face, lambda view: view.confirmed == 1)
    assert view.servers[0].state == "READY"


async def test_what_is_published_and_confirmed_only_grows_and_the_last_version_arrives(face):
    publisher = await registered(face)
    for version in range(8):
        await publish(face, publisher, version)
    seen = []
    await see(face, lambda view: seen.append((view.published, view.confirmed)) or view.confirmed == 7)
    assert seen == sorted(seen, key=lambda pair: (pair[0], -1 if pair[1] is None else pair[1]))
    figures = face.service.summary()["sync"]
    assert figures["count"] + figures["skipped"] == 7
    assert figures["verified"]


async def test_versions_published_while_a_server_is_busy_are_skipped_but_for_the_last(face):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await see(face, lambda view: view.confirmed == 0)
    face.hold()
    await publish(face, publisher, 1)
    await see(face, lambda view: view.servers[0].state == "UPDATING")
    for version in (2, 3, 4):
        await publish(face, publisher, version)
    await see(face, lambda view: view.published == 4)
    face.let_go()
    await see(face, lambda view: view.confirmed == 4)
    figures = face.service.summary()["sync"]
    assert (figures["count"], figures["skipped"]) == (2, 2)


async def test_wait_confirmed_says_whether_the_servers_have_it(face):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await see(face, lambda view: view.confirmed == 0)
    assert await face.call(publisher.wait_confirmed, 0, 5.0)
    assert not await face.call(publisher.wait_confirmed, 1, 0.05)


async def test_latest_has_the_figures_of_the_last_confirmed_update(face):
    publisher = await registered(face)
    assert publisher.latest() == {}
    for version in range(3):
        await publish(face, publisher, version)
        await see(face, lambda view, version=version: view.confirmed == version)
    await face.call(publisher.wait_confirmed, 2, 5.0)
    assert set(publisher.latest()) == {"sync/pause_ms", "sync/transfer_ms", "sync/bytes", "sync/version_lag"}
    assert publisher.latest()["sync/bytes"] > 0


async def test_versions_must_grow(face):
    publisher = await registered(face)
    await publish(face, publisher, 3)
    with pytest.raises((SyncError, RemoteError), match="versions must grow: 3 after 3"):
        await face.call(publisher.acquire, 3)


async def test_a_publisher_that_announces_itself_again_changes_nothing(face):
    publisher = await registered(face)
    for version in (0, 1):
        await publish(face, publisher, version)
        await see(face, lambda view, version=version: view.confirmed == version)
    before = await face.fleet.watch(-1, 5.0)
    await face.call(publisher.reannounce)
    assert await face.fleet.watch(before.seq, 0.1) == before
    await publish(face, publisher, 2)
    await see(face, lambda view: view.confirmed == 2)


async def test_a_restarted_server_leaves_traffic_until_it_has_the_current_version(face):
    publisher = await registered(face)
    await publish(face, publisher, 0)
    await see(face, lambda view: view.confirmed == 0)
    states: list[str] = []
    watching = asyncio.create_task(
        see(face, lambda view: states.append(view.servers[0].state) or ("STALE" in states and view.confirmed == 0))
    )
    await asyncio.sleep(0)
    await face.restart()
    view = await watching
    assert view.servers[0].state == "READY"
    assert face.service.summary()["sync"]["verified"]


async def test_a_new_incarnation_takes_over_and_the_old_one_is_refused(face):
    old = await registered(face, incarnation=1)
    await publish(face, old, 5)
    await see(face, lambda view: view.confirmed == 5)
    new = await registered(face, incarnation=2)
    view = await face.fleet.watch(-1, 5.0)
    assert (view.incarnation, view.confirmed, view.servers[0].state) == (2, None, "STALE")
    with pytest.raises((StaleIncarnation, RemoteError), match="incarnation 1 of the trainer is over, 2 has begun"):
        await face.call(old.acquire, 6)
    await publish(face, new, 3)
    view = await see(face, lambda view: view.confirmed == 3)
    assert view.servers[0].state == "READY"
