"""Doors: a peer without the run's keys gets nothing in and nothing out."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import zmq

from asyncrl.errors import DeadlineExceeded, TransportError, UserError
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.transport import keys as key_files
from asyncrl.transport import security
from asyncrl.transport.hosts import EVERYWHERE, addresses_of_host, interface_of, is_here, is_loopback, reachable_address
from asyncrl.transport.keys import Keys, make_keys, new_keys, read_keys, remove_keys
from asyncrl.transport.rpc import RpcClient, RpcServer, call_once
from asyncrl.transport.security import Door, door_to, open_door
from asyncrl.transport.values import pack_values
from asyncrl.weight_sync.channel import ReceiverChannel
from asyncrl.weight_sync.receiver import WeightReceiver
from tests.messages.samples import trajectory
from tests.transport.queues import QueueUnderTest, topic
from tests.waiting import until
from tests.weight_sync.stand_in import StagedModel, StandInTarget, a_model

CALL = [(1).to_bytes(8, "big"), *pack_values(["record", {"what": "a stranger's"}])]
PATIENCE_MS = 400  # a handshake on loopback takes 2 ms


@pytest.fixture
def keys() -> Iterator[Keys]:
    """This process has entered a run whose sockets are guarded."""
    keys = new_keys()
    security.enter(Door(keys=keys))
    yield keys
    security.leave()


@pytest.fixture
async def server(keys: Keys):
    recorded: list[str] = []
    server = RpcServer({"record": lambda what: recorded.append(what) or len(recorded)})
    server.recorded = recorded
    await server.start()
    yield server
    await server.close()


def stranger(context: zmq.Context, keys: Keys | None) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    Door(keys=keys).guard(socket, serves=False)
    return socket


def shout(address: str, keys: Keys | None, frames: list[bytes]) -> bool:
    """Send from a socket of its own; whether an answer came."""
    with zmq.Context() as context, stranger(context, keys) as socket:
        socket.connect(address)
        socket.send_multipart(frames)
        return bool(socket.poll(PATIENCE_MS))


async def test_calls_and_answers_pass_between_those_who_have_the_keys(server):
    client = RpcClient(server.address)
    assert await client.call("record", timeout=5, what="ours") == 1
    assert await asyncio.to_thread(call_once, server.address, "record", timeout=5, what="ours too") == 2
    await client.close()


@pytest.mark.parametrize("who", ["no key", "another server's key", "a key of its own"])
async def test_a_stranger_gets_nothing_in_and_nothing_out(server, keys, who):
    other = new_keys()
    pair = {"client_public": other.client_public, "client_secret": other.client_secret}
    theirs = {"no key": None, "another server's key": other, "a key of its own": replace(keys, **pair)}[who]
    assert not await asyncio.to_thread(shout, server.address, theirs, CALL)
    assert server.recorded == []
    assert sum(server.stats.values()) == 0, "not even a malformed frame was read"
    assert await asyncio.to_thread(shout, server.address, keys, CALL), "the same from one who has them is answered"


async def test_one_who_has_the_keys_tells_nothing_to_a_server_without_them(keys):
    """Whoever took the address of a server learns nothing from those who call it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.setsockopt(zmq.LINGER, 0)
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        client = RpcClient(f"tcp://127.0.0.1:{port}")
        with pytest.raises(DeadlineExceeded):
            await client.call("record", timeout=PATIENCE_MS / 1000, what="a secret")
        assert not impostor.poll(0)
        await client.close()


async def test_a_recorded_conversation_played_again_changes_nothing(server):
    heard: list[bytes] = []
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")

    async def carry(reader, writer, kept=None):
        while data := await reader.read(65_536):
            if kept is not None:
                kept.append(data)
            writer.write(data)
        writer.close()

    async def tap(reader, writer):
        there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, there[1], heard), carry(there[0], writer))

    relay = await asyncio.start_server(tap, "127.0.0.1", 0)
    client = RpcClient(f"tcp://127.0.0.1:{relay.sockets[0].getsockname()[1]}")
    assert await client.call("record", timeout=5, what="ours") == 1
    await client.close()
    await until(lambda: len(heard) >= 3)
    relay.close()
    assert b"ours" not in b"".join(heard), "what is said is not to be read on the way"

    reader, writer = await asyncio.open_connection(host, int(port))
    for part in heard:
        writer.write(part)
        await asyncio.sleep(0.02)
    async with asyncio.timeout(10):
        while await reader.read(65_536):
            pass  # until the server hangs up
    writer.close()
    assert server.recorded == ["ours"]


async def test_a_server_without_a_doorkeeper_admits_nobody(server, keys):
    security.dismiss(zmq.Context.instance())
    assert not await asyncio.to_thread(shout, server.address, keys, CALL)
    assert server.recorded == []


async def test_messages_pass_through_a_guarded_queue(keys):
    queue = await QueueUnderTest("socket").open(topic())
    sender, receiver = queue.sender(), queue.receiver()
    await sender.send([trajectory()])
    (delivery,) = await receiver.receive(max_items=1, timeout=10)
    assert delivery.message.id == trajectory().id
    assert not await asyncio.to_thread(shout, queue._address, None, [msgpack.packb(["sender", "rollouts", "rollouter", 1])])
    assert queue.broker.stats()["frames"] == {}
    await queue.close()


async def test_versions_pass_through_a_guarded_receiver(keys):
    target, staged = StandInTarget(a_model()), StagedModel(a_model(seed=1))
    receiver = WeightReceiver(target)
    address = receiver.start()
    channel = ReceiverChannel(address)
    try:
        assert (await channel.update(staged.order(PolicyVersion(1, 1), carrier="zeromq"))).verified
        status = msgpack.packb({"kind": "STATUS", "request": 1, "incarnation": 0, "version": 0})
        assert not await asyncio.to_thread(shout, address, None, [status])
        assert (await channel.status(5))["malformed"] == 0
    finally:
        await channel.close()
        receiver.close()
        staged.remove()


def test_a_closed_receiver_leaves_no_doorkeeper(keys):
    receiver = WeightReceiver(StandInTarget(a_model()))
    receiver.start()
    receiver.close()
    assert receiver._context.closed
    assert security._Doorkeeper._all == {}


def test_a_doorkeeper_that_was_dismissed_makes_room_for_the_next_at_once(keys):
    context = zmq.Context()
    for _ in range(300):
        with context.socket(zmq.ROUTER) as socket:
            security.door().guard(socket, serves=True)
        security.dismiss(context)
    context.term()


def test_on_loopback_sockets_are_as_they_were():
    assert security.door() == Door()
    assert security.door().place("tcp://127.0.0.1:*") == "tcp://127.0.0.1:*"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        security.door().guard(socket, serves=True)
        assert socket.getsockopt(zmq.MECHANISM) == zmq.NULL
    assert security._Doorkeeper._all == {}


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_key_files_are_their_owners_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        keys = make_keys(tmp_path)
    finally:
        os.umask(before)
    folder = tmp_path / key_files.FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert read_keys(tmp_path, serves=True) == keys
    assert read_keys(tmp_path, serves=False) == replace(keys, server_secret=None)
    assert keys.server_secret not in (folder / "client.json").read_text()
    assert not re.search(f"{re.escape(keys.client_secret)}|{keys.token}", repr(keys)), "no secret stands in a traceback"


def test_every_launch_has_keys_of_its_own(tmp_path):
    first, second = make_keys(tmp_path), make_keys(tmp_path)
    assert not {*json.loads(json.dumps(vars(first))).values()} & {*vars(second).values()}
    remove_keys(tmp_path)
    assert not (tmp_path / key_files.FOLDER).exists()
    with pytest.raises(TransportError, match="the run's keys are gone"):
        read_keys(tmp_path, serves=False)


@pytest.mark.parametrize(("part", "mode"), [("", 0o750), ("client.json", 0o640), ("server.json", 0o604)])
def test_keys_that_others_may_read_are_not_used(tmp_path, part, mode):
    make_keys(tmp_path)
    (tmp_path / key_files.FOLDER / part).chmod(mode)
    with pytest.raises(UserError, match=f"may be read or changed by others \\(mode {mode:o}\\)"):
        read_keys(tmp_path, serves=True)


def test_a_link_is_no_key_file(tmp_path):
    make_keys(tmp_path)
    path = tmp_path / key_files.FOLDER / "client.json"
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UserError, match="you may not read"):
        read_keys(tmp_path, serves=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_somebody_else_is_told_whose_they_are(tmp_path):
    make_keys(tmp_path)
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="do this as the user who launched it"):
            door_to(tmp_path, "tcp://192.0.2.7:20001")
        assert door_to(tmp_path, "tcp://127.0.0.1:20001") == Door()
    finally:
        os.seteuid(0)


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_door_on_loopback_needs_no_keys(tmp_path):
    assert open_door(tmp_path, "127.0.0.1") == Door()
    assert open_door(tmp_path, "127.0.0.5").place("tcp://127.0.0.1:*") == "tcp://127.0.0.5:*"


def test_a_door_beyond_loopback_binds_everywhere_and_says_where_it_is_reached(tmp_path):
    keys = make_keys(tmp_path)
    door = open_door(tmp_path, EVERYWHERE, node_address="192.0.2.7")
    assert door == Door(EVERYWHERE, "192.0.2.7", keys)
    assert door.place("tcp://192.0.2.7:20001") == "tcp://0.0.0.0:20001"
    assert door.known_as("http://0.0.0.0:20002") == "http://192.0.2.7:20002"
    assert door.place("inproc://here") == "inproc://here"


def test_an_address_of_another_host_is_refused_with_those_of_this_one(tmp_path):
    with pytest.raises(UserError, match=r"cluster.bind_address is 198\.51\.100\.9, which .* does not have.*127\.0\.0\.1"):
        open_door(tmp_path, "198.51.100.9")


def test_addresses_of_this_host():
    found = addresses_of_host()
    assert "127.0.0.1" in found.values()
    assert all(is_here(address) and interface_of(address) for address in found.values())
    assert is_loopback("127.8.9.1")
    assert is_loopback("localhost")
    assert not any(map(is_here, ("198.51.100.9", "no address", "::1", "1.2.3")))
    if any(not is_loopback(address) for address in found.values()):
        assert reachable_address() in found.values()
