"""Programs for the two sides of a door, each in a network namespace of its own.

python -m tests.chaos.doors serve RUN_DIR ADDRESS     every kind of socket of a run; one line of addresses; at the end of its
                                                      input one line with what got in
python -m tests.chaos.doors call ADDRESSES RUN_DIR WHO …
                                                      tries them all; one line with what came out for each WHO: the "owner" of
                                                      the keys, "nobody", one with his "own-key", or of an "other-server"
python -m tests.chaos.doors dawdle ADDRESSES NUMBER   so many connections to each that say half a greeting, or nothing
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import msgpack
import zmq

from asyncrl.transport import security
from asyncrl.transport.keys import new_keys, read_keys
from asyncrl.transport.security import Door, open_door
from asyncrl.transport.values import pack_values

ANSWER_MS = 1000
LEASE_SECONDS = 1.0
REQUESTS = {
    "rpc": [(1).to_bytes(8, "big"), *pack_values(["record", {"what": "a word"}])],
    "broker": [msgpack.packb(["receiver", "rollouts", "somebody", 1])],
    "weights": [msgpack.packb({"kind": "STATUS", "request": 1, "incarnation": 0, "version": 0})],
}
HALF_A_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"


async def serve(run_dir: Path, address: str) -> None:
    from asyncrl.clock import SystemClock
    from asyncrl.engines.embedded.http import HttpFront
    from asyncrl.transport.broker import Broker
    from asyncrl.transport.exchange import Exchange
    from asyncrl.transport.rpc import RpcServer
    from asyncrl.weight_sync.receiver import WeightReceiver
    from tests.transport.queues import topic
    from tests.weight_sync.stand_in import StandInTarget, a_model

    door = open_door(run_dir, address)
    security.enter(door)
    recorded: list[str] = []
    rpc = RpcServer({"record": lambda what: recorded.append(what) or len(recorded), "stats": lambda: stats()})
    broker = Broker(Exchange([topic()], lease_seconds=LEASE_SECONDS), clock=SystemClock())
    receiver = WeightReceiver(StandInTarget(a_model()))
    front = HttpFront(SimpleNamespace(alive=True), None, model_path="none", token=door.token)  # type: ignore[arg-type]
    addresses = {
        "rpc": await rpc.start(),
        "broker": await broker.start(),
        "weights": receiver.start(),
        "http": door.known_as(await front.start(door.host)),
    }

    def stats() -> dict[str, Any]:
        executor = receiver._executor.status()
        return {"rpc": rpc.stats, "broker": broker.stats(), "weights": {"malformed": receiver._malformed, **executor}}

    print(json.dumps(addresses), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    got_in = {
        "recorded": recorded,
        "rpc": {kind: count for kind, count in rpc.stats.items() if count},
        "broker": {"receivers": len(broker._receivers), **broker.stats()["frames"]},
        "weights": {"malformed": receiver._malformed},
    }
    await asyncio.gather(rpc.close(), broker.close(), front.close())
    receiver.close()
    security.leave()
    print(json.dumps(got_in), flush=True)


def call(addresses: dict[str, str], door: Door) -> dict[str, Any]:
    """By kind: whether a ZeroMQ server answered, or the status of HTTP's answer; None: no answer."""
    found: dict[str, Any] = {}
    with zmq.Context() as context, ExitStack() as opened:
        asked = {}
        for kind, request in REQUESTS.items():
            asked[kind] = opened.enter_context(context.socket(zmq.DEALER))
            asked[kind].setsockopt(zmq.LINGER, 0)
            door.guard(asked[kind], serves=False)
            asked[kind].connect(addresses[kind])
            asked[kind].send_multipart(request)
        for kind, asker in asked.items():
            found[kind] = bool(asker.poll(ANSWER_MS))
    headers = {"Authorization": f"Bearer {door.token}"} if door.token is not None else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{addresses['http']}/ping", headers=headers), timeout=5) as answer:
            found["http"] = answer.status
    except urllib.error.HTTPError as refusal:
        with refusal:
            found["http"] = refusal.code
    except OSError:
        found["http"] = None
    return found


def door_of(who: str, run_dir: str) -> Door:
    if who == "nobody":
        return Door()
    keys = read_keys(Path(run_dir), serves=False)
    other = new_keys()
    if who == "own-key":
        keys = replace(keys, client_public=other.client_public, client_secret=other.client_secret, token=other.token)
    if who == "other-server":
        keys = replace(keys, server_public=other.server_public, token="")
    return Door(keys=keys)


def dawdle(addresses: dict[str, str], number: int) -> None:
    """Until the end of the input."""
    with ExitStack() as opened:
        for address in addresses.values():
            where = urlsplit(address)
            for count in range(number):
                connection = socket.create_connection((where.hostname, where.port), timeout=5)
                opened.enter_context(connection)
                connection.sendall(HALF_A_GREETING if count % 2 else b"")
        print("there", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", run_dir, address]:
            asyncio.run(serve(Path(run_dir), address))
        case ["call", addresses, run_dir, *everybody]:
            print(json.dumps([call(json.loads(addresses), door_of(who, run_dir)) for who in everybody]), flush=True)
        case ["dawdle", addresses, number]:
            dawdle(json.loads(addresses), int(number))
