"""Doors across a real network: two namespaces with a cable between them."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from asyncrl.transport.keys import FOLDER, make_keys
from tests.end_to_end.runs import ROOT

HERE, THERE = "10.213.7.1", "10.213.7.2"
NOTHING = {"rpc": False, "broker": False, "weights": False}
NOTHING_IN = {"recorded": [], "rpc": {}, "broker": {"receivers": 0}, "weights": {"malformed": 0}}


@dataclass
class Network:
    """Two namespaces: the run's (`HERE`) and another host's (`THERE`)."""

    here: str
    there: str

    def start(self, namespace: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", namespace, sys.executable, "-W", "error", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        return subprocess.Popen(command, **{**pipes, **options})

    def call(self, namespace: str, addresses: dict[str, str], who: str, run_dir: Path) -> dict[str, Any]:
        process = self.start(namespace, "-m", "tests.chaos.doors", "call", json.dumps(addresses), who, str(run_dir))
        answer, _ = process.communicate(timeout=60)
        return dict(json.loads(answer))


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    mark = secrets.token_hex(3)
    here, there = f"doors-{mark}-a", f"doors-{mark}-b"
    cable = (f"dr{mark}a", f"dr{mark}b")
    try:
        try:
            for name in (here, there):
                ip("netns", "add", name)
            ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
            for name, end, address in ((here, cable[0], HERE), (there, cable[1], THERE)):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as refusal:
            pytest.skip(f"this machine makes no network namespaces: {refusal}")
        yield Network(here, there)
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


class Served:
    """A process with every kind of socket of a run, in the run's namespace."""

    def __init__(self, network: Network, run_dir: Path, address: str):
        self.run_dir = run_dir
        self.process = network.start(network.here, "-m", "tests.chaos.doors", "serve", str(run_dir), address)
        self._out: IO[str] = self.process.stdout  # type: ignore[assignment]
        self.addresses: dict[str, str] = json.loads(self._out.readline())

    def end(self) -> dict[str, Any]:
        """What got in."""
        answer, _ = self.process.communicate("", timeout=60)
        return dict(json.loads(answer))


def test_a_peer_without_the_keys_gets_nothing_in_and_nothing_out(network, tmp_path):
    make_keys(tmp_path)
    served = Served(network, tmp_path, "0.0.0.0")
    assert all(f"//{HERE}:" in address for address in served.addresses.values())
    for who, status in (("nobody", 401), ("own-key", 401), ("other-server", 401)):
        assert network.call(network.there, served.addresses, who, tmp_path) == {**NOTHING, "http": status}
    assert network.call(network.there, served.addresses, "owner", tmp_path) == {**dict.fromkeys(NOTHING, True), "http": 200}
    got_in = served.end()
    assert got_in == {**NOTHING_IN, "recorded": ["a word"], "rpc": {"calls": 1}, "broker": {"receivers": 1}}


def test_hundreds_of_half_greetings_keep_nobody_out(network, tmp_path):
    make_keys(tmp_path)
    served = Served(network, tmp_path, HERE)
    dawdler = network.start(network.there, "-m", "tests.chaos.doors", "dawdle", json.dumps(served.addresses), "200")
    assert dawdler.stdout.readline() == "there\n"
    assert network.call(network.there, served.addresses, "owner", tmp_path) == {**dict.fromkeys(NOTHING, True), "http": 200}
    dawdler.communicate("", timeout=30)
    assert served.end()["rpc"] == {"calls": 1}


def test_on_loopback_nobody_gets_there_and_nothing_is_asked(network, tmp_path):
    served = Served(network, tmp_path, "127.0.0.1")
    assert not (tmp_path / FOLDER).exists()
    from_outside = {kind: address.replace("127.0.0.1", HERE) for kind, address in served.addresses.items()}
    assert network.call(network.there, from_outside, "nobody", tmp_path) == {**NOTHING, "http": None}
    assert network.call(network.here, served.addresses, "nobody", tmp_path) == {**dict.fromkeys(NOTHING, True), "http": 200}
    assert served.end()["recorded"] == ["a word"]
