"""Runs under abuse: garbage on every port, processes that hang, a launcher that is killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import msgpack
import psutil
import pytest
import zmq

from asyncrl.transport.rpc import call_once
from tests.end_to_end.runs import Launched, leftovers, listening_at, pids_of, until
from tests.end_to_end.test_short_runs import assert_sound

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]
GARBAGE_SECONDS = 1.0
HTTP = (
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Le",
    b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"input',
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]",
    b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n{"input_ids":[-1],"sampling_params":{"n":',
)
METHODS = ("ledger.end", "ledger.dispatch", "register", "staged", "score", "track", "in_flight", "nobody's", 1, None)
BROKER = ("sender", "announce", "write", "receiver", "cancel", "lost", "settle", "refuse", "leave", "nobody's", 1)
WEIGHTS = ("BEGIN", "FETCH", "BUCKET", "DIGEST", "STATUS", [1], None)


def test_garbage_on_every_port_changes_nothing(tmp_path: Path) -> None:
    run = Launched(tmp_path / "run", "training.steps=60")
    run.until_step(2)
    assert listening_at(run) == {"127.0.0.1"}
    with ThreadPoolExecutor(16) as strangers, ExitStack() as open_until_the_end:
        shouts = [strangers.submit(shout, random.Random(seed), *where) for seed, where in enumerate(ports(run))]
        for heard in shouts:
            for connection in heard.result():
                open_until_the_end.enter_context(connection)
        assert run.process.poll() is None, "the run ended before the garbage did"
        assert run.wait() == 0, run.text
    assert_sound(run)
    assert run.summary["samples"]["failed"] == 0


def ports(run: Launched) -> Iterator[tuple[str, str]]:
    """(kind, address) of every socket that the run has bound."""
    supervisor = run.started["rpc"]
    yield "rpc", supervisor
    for addresses in call_once(supervisor, "book", timeout=10).values():
        for kind in {"rpc", "broker", "weights", "http"} & addresses.keys():
            yield kind, addresses[kind]


def shout(rng: random.Random, kind: str, address: str) -> list[socket.socket]:
    """Bytes that are no protocol, half requests that stay open, and, where ZeroMQ listens, frames for GARBAGE_SECONDS."""
    where = urlsplit(address)
    idle = []
    for text in (*HTTP, rng.randbytes(300), b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"):
        connection = socket.create_connection((where.hostname, where.port), timeout=5)
        connection.sendall(text)
        idle.append(connection)
    if kind != "http":
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(address)
            ends = time.monotonic() + GARBAGE_SECONDS
            while time.monotonic() < ends:
                stranger.send_multipart(frames(rng, kind))
                while stranger.poll(2):
                    stranger.recv_multipart()
            stranger.send_multipart([b"12345678", bytes(20_000_000)])
    return idle


def frames(rng: random.Random, kind: str) -> list[bytes]:
    match rng.randrange(4):
        case 0:
            return [rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(1, 4))]
        case 1:
            return [rng.randbytes(8), b"\x81\x91\x01\x01"]  # a map whose key is a list
    if kind == "rpc":
        packed = msgpack.packb([rng.choice(METHODS), {"groups": value(rng), "ends": value(rng), "batch": value(rng)}])
        return [rng.randbytes(8), packed[: rng.choice((None, 5))]]
    if kind == "broker":
        fields = (value(rng) for _ in range(rng.randrange(4)))
        return [msgpack.packb([rng.choice(BROKER), rng.choice(("rollouts", "nobody's")), *fields])]
    header = {"kind": rng.choice(WEIGHTS), "request": 1, "incarnation": rng.choice((0, 2**62, -1, "x")), "version": value(rng)}
    return [msgpack.packb({**header, "plan_id": value(rng), "plan": value(rng), "slots": value(rng)})]


def value(rng: random.Random) -> object:
    return rng.choice((None, True, -1, 0, 2**63, float("nan"), "0/0/0", b"\0", [], [[0, 0, 0, "trained", "", False]], {"a": [1]}))


@pytest.mark.long
@pytest.mark.parametrize("row", ["rollouter", "message_queue", "trainer/0", "inference/0", "parameter_sync", "reward"])
def test_a_service_that_is_suspended_for_a_while_costs_time_only(tmp_path: Path, row: str) -> None:
    run = Launched(tmp_path / "run", "training.steps=40")
    run.until_step(3)
    process = psutil.Process(pids_of(run.status())[row])
    process.suspend()
    time.sleep(20)
    process.resume()
    assert run.wait() == 0, run.text
    assert_sound(run)


@pytest.mark.long
@pytest.mark.parametrize("row", ["rollouter", "message_queue", "trainer/0", "inference/0", "parameter_sync", "reward"])
def test_a_service_that_is_suspended_for_good_ends_the_run_by_its_name(tmp_path: Path, row: str) -> None:
    run = Launched(tmp_path / "run", "training.steps=100000", "cluster.max_restarts=0")
    run.until_step(3)
    psutil.Process(pids_of(run.status())[row]).suspend()
    assert run.wait(240) == 1, run.text
    assert f"service {row} died: its process has not answered for" in run.summary["error"]
    assert leftovers(run.run_dir) == []


@pytest.mark.long
def test_a_killed_launcher_leaves_nothing_and_its_run_can_be_audited(tmp_path: Path) -> None:
    run = Launched(tmp_path / "run", "training.steps=100000")
    run.until_step(3)
    rows = [psutil.Process(pid) for pid in pids_of(run.status()).values()]
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    until(lambda: leftovers(run.run_dir) == [] and not any(row.is_running() for row in rows), 30, "a clean end")
    assert run.command("audit").returncode == 0
