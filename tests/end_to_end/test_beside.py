"""Runs beside each other, and on a cluster that is there already."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.runs import Launched, until
from tests.end_to_end.test_short_runs import assert_sound

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(300)]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def test_two_runs_beside_each_other(tmp_path: Path) -> None:
    runs = [Launched(tmp_path / name, f"seed={seed}") for seed, name in enumerate(("one", "two"))]
    for run in runs:
        assert run.wait(240) == 0, run.text
    for run in runs:
        assert_sound(run)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of one node, started by hand as an administrator would."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        start = ["start", "--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", f"--temp-dir={folder}"]
        head = subprocess.Popen([*RAY, *start, "--block"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: accepts(port), 60, "the cluster")
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait(30)


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_on_an_existing_cluster_leaves_the_cluster_alone(tmp_path: Path, cluster: str) -> None:
    for name in ("first", "second"):
        run = Launched(tmp_path / name, f"cluster.ray_address={cluster}")
        assert run.wait(240) == 0, run.text
        assert_sound(run)
