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
from tests.end_to_end.runs import QUICKSTART, ROOT, SHORT, until

HERE, THERE = "10.213.7.1", "10.213.7.2"
NOTHING = {"rpc": False, "broker": False, "weights": False}
EVERYTHING = dict.fromkeys(NOTHING, True)
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

    def call(self, namespace: str, addresses: dict[str, str], run_dir: Path, *everybody: str) -> list[dict[str, Any]]:
        process = self.start(namespace, "-m", "tests.chaos.doors", "call", json.dumps(addresses), str(run_dir), *everybody)
        answer, _ = process.communicate(timeout=60)
        return list(json.loads(answer))


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
    """Nor do hundreds of connections that say half a greeting keep anybody else out."""
    make_keys(tmp_path)
    served = Served(network, tmp_path, "0.0.0.0")
    assert all(f"//{HERE}:" in address for address in served.addresses.values())
    dawdler = network.start(network.there, "-m", "tests.chaos.doors", "dawdle", json.dumps(served.addresses), "200")
    assert dawdler.stdout.readline() == "there\n"
    strangers = network.call(network.there, served.addresses, tmp_path, "nobody", "own-key", "other-server")
    assert strangers == [{**NOTHING, "http": 401}] * 3
    assert network.call(network.there, served.addresses, tmp_path, "owner") == [{**EVERYTHING, "http": 200}]
    dawdler.communicate("", timeout=30)
    assert served.end() == {**NOTHING_IN, "recorded": ["a word"], "rpc": {"calls": 1}, "broker": {"receivers": 1}}


def test_on_loopback_nobody_gets_there_and_nothing_is_asked(network, tmp_path):
    served = Served(network, tmp_path, "127.0.0.1")
    assert not (tmp_path / FOLDER).exists()
    from_outside = {kind: address.replace("127.0.0.1", HERE) for kind, address in served.addresses.items()}
    assert network.call(network.there, from_outside, tmp_path, "nobody") == [{**NOTHING, "http": None}]
    assert network.call(network.here, served.addresses, tmp_path, "nobody") == [{**EVERYTHING, "http": 200}]
    assert served.end()["recorded"] == ["a word"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_whole_run_beyond_loopback_is_its_owners_alone(network, tmp_path):
    """Launched in one namespace, asked from the other: with the keys as from here, without them in vain."""
    run = tmp_path / "run"
    sets = (*SHORT, "training.steps=60", f"cluster.bind_address={HERE}", f"tracking.mlflow.uri=sqlite:///{tmp_path}/mlflow.db")
    options = [text for value in sets for text in ("--set", value)]
    command = ["-m", "asyncrl.cli", "launch", str(QUICKSTART), "--run-dir", str(run), *options]
    output = tmp_path / "output.txt"
    with output.open("w") as out:
        launched = network.start(network.here, *command, cwd=tmp_path, stdin=None, stdout=out, stderr=subprocess.STDOUT)
    metrics = run / "metrics.jsonl"
    until(lambda: launched.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 2), 120, "a step")
    assert launched.poll() is None, output.read_text()

    def asks(name: str, *more: str) -> tuple[int, str]:
        command = ["-m", "asyncrl.cli", name, str(run), *more]
        with network.start(network.there, *command, cwd=tmp_path, stderr=subprocess.STDOUT) as asked:
            text, _ = asked.communicate(timeout=90)
        return asked.returncode, text

    code, text = asks("status", "--json")
    assert code == 0
    assert {row["state"] for row in json.loads(text)["services"]}.isdisjoint({"silent", "starting"})
    assert asks("audit")[0] == 0
    addresses = json.loads((run / "run.json").read_text())
    assert addresses["rpc"].startswith(f"tcp://{HERE}:")
    key = run / FOLDER / "client.json"
    key.chmod(0o644)
    code, text = asks("stop")
    assert (code, "may be read or changed by others" in text) == (2, True)
    key.chmod(0o600)
    assert launched.wait(300) == 0, output.read_text()
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert not (run / FOLDER).exists()
    assert asks("audit")[0] == 0
