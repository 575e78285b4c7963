"""The janitor: what it clears away, when, and that it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.cluster import sweep
from asyncrl.cluster.janitor import MARK, Janitor, kill_marked, marked_processes

LAUNCHER = """
import subprocess, sys, time
from asyncrl.cluster.janitor import Janitor
janitor = Janitor(sys.argv[1], files=sys.argv[2], folders=[sys.argv[3]])
print("up", flush=True)
sys.stdin.read()
janitor.dismiss()
"""


@pytest.fixture
def run_id() -> Iterator[str]:
    run_id = uuid.uuid4().hex[:12]
    yield run_id
    kill_marked(run_id)
    sweep.remove_shared_memory(run_id)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def marked(run_id: str) -> subprocess.Popen[bytes]:
    """A process of the run, with a child of its own."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: run_id})


def test_processes_of_a_run_are_known_by_their_mark_and_killed_with_their_children(run_id):
    with marked(run_id) as process:
        assert until(lambda: len(marked_processes(run_id)) == 2)
        assert kill_marked(run_id) == 2
    assert process.returncode == -signal.SIGKILL
    assert marked_processes(run_id) == []


def test_a_process_of_ray_that_lost_its_mark_is_known_by_its_log(run_id, tmp_path):
    rename = "open('/proc/self/comm', 'w').write('ray::Agent')"
    code = f"import sys, time; {rename}; log = open(sys.argv[1], 'w'); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path / "agent.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert marked_processes(run_id) == []
        assert marked_processes(run_id, [str(tmp_path)]) == [process.pid]
        kill_marked(run_id, [str(tmp_path)])


@pytest.mark.parametrize("launcher_dies", [True, False])
def test_what_a_killed_launcher_left_is_cleared_away(run_id, tmp_path, launcher_dies):
    folder = tmp_path / "ray"
    folder.mkdir()
    slot = Path(f"{sweep.shared_memory_of(run_id)}r0-s0")
    slot.write_bytes(b"weights")
    command = [sys.executable, "-c", LAUNCHER, run_id, sweep.shared_memory_of(run_id), str(folder)]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with launcher, marked(run_id) as process:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        if launcher_dies:
            launcher.kill()
            assert until(lambda: not slot.exists() and not folder.exists() and process.poll() is not None)
        else:
            launcher.communicate(timeout=20)
            assert process.poll() is None
            assert slot.exists()
            assert folder.exists()
            process.kill()
    assert until(lambda: not janitors(run_id))


def test_a_dismissed_janitor_has_gone(run_id):
    janitor = Janitor(run_id, files=sweep.shared_memory_of(run_id))
    assert until(lambda: len(janitors(run_id)) == 1)
    janitor.dismiss()
    assert until(lambda: janitors(run_id) == [])


def test_a_janitor_that_somebody_killed_can_be_dismissed(run_id):
    janitor = Janitor(run_id, files=sweep.shared_memory_of(run_id))
    assert until(lambda: len(janitors(run_id)) == 1)
    os.kill(janitors(run_id)[0], signal.SIGKILL)
    assert until(lambda: janitors(run_id) == [])
    janitor.dismiss()


def janitors(run_id: str) -> list[int]:
    """Processes whose command line is a janitor's of this run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if run_id.encode() in words and any(b"asyncrl.cluster.janitor" in word for word in words):
                found.append(int(folder.name))
    return found
