"""Commands on a live run beyond loopback: they need its keys, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.transport import security
from asyncrl.transport.hosts import addresses_of_host, is_loopback
from asyncrl.transport.keys import FOLDER, make_keys, remove_keys
from asyncrl.transport.security import Door, open_door
from tests.cli.harness import asyncrl, live_run

ADDRESS = next((address for address in addresses_of_host().values() if not is_loopback(address)), None)
pytestmark = pytest.mark.skipif(ADDRESS is None, reason="this machine has no address beyond loopback")
STATUS = {"state": "running", "name": "sums", "step": 3, "steps": 9, "services": [], "elapsed_s": 1.0}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    make_keys(tmp_path)
    security.enter(open_door(tmp_path, str(ADDRESS)))
    with live_run(tmp_path, {"status": lambda: STATUS, "stop": lambda: None, "book": dict}):
        security.enter(Door())  # whoever calls has no door but the one that he finds
        yield tmp_path
    security.leave()


def test_who_may_read_the_keys_is_answered(run):
    assert asyncrl("status", run, "--json").json["step"] == 3
    assert "sums: running, step 3 of 9" in asyncrl("top", run, "--once").out


@pytest.mark.parametrize("command", ["status", "top", "stop", "audit"])
def test_who_may_not_is_told_why(run, command):
    (run / "ledger.sqlite").touch()
    (run / FOLDER / "client.json").unlink()
    (run / FOLDER / "client.json").symlink_to("/etc/hostname")
    outcome = asyncrl(command, run)
    assert outcome.code == 2
    assert "do this as the user who launched it" in outcome.err


def test_a_run_whose_keys_are_gone_is_about_to_end(run):
    remove_keys(run)
    found = asyncrl("status", run, "--json").json
    assert found["state"] == "silent"
    assert "the run's keys are gone" in found["error"]
