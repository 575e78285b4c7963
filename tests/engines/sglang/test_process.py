"""A server as a child process: readiness, its last words, and nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.engines.sglang.arguments import ServerOptions
from asyncrl.engines.sglang.process import AttachedServers, OwnServers, check_version
from asyncrl.errors import DeadlineExceeded, RunError, UserError
from tests.waiting import until

STAND_IN = str(Path(__file__).with_name("stand_in_server.py"))


def servers(folder: Path, mode: str, python: str = sys.executable) -> OwnServers:
    options = ServerOptions(python, STAND_IN, "/model", "float32", 64, 8, "cpu", further={"stand-in": mode})
    return OwnServers(options, folder / "server.log")


def made(folder: Path, mode: str):
    own = servers(folder, mode)
    return own.make(own.address({}))


def child_of(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "server.log").read_text().split("child ")[1].split()[0]))


async def test_a_server_serves_reports_and_leaves_nothing(tmp_path):
    server = made(tmp_path, "serves")
    await server.start(20)
    child = child_of(tmp_path)
    assert await server.load() == {"running": 3, "waiting": 1, "kv_use": 0.25, "tokens_per_second": 40.0}
    await server.end()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert await server.load() == {}


async def test_a_server_that_ends_at_once_is_told_with_its_last_words(tmp_path):
    server = made(tmp_path, "dies")
    with pytest.raises(RunError, match=r"ended \(exit code 3\); its log ends:\nValueError: no such model"):
        await server.start(20)
    await server.end()


async def test_a_server_that_is_never_ready_is_given_up_at_the_deadline(tmp_path):
    server = made(tmp_path, "hangs")
    with pytest.raises(DeadlineExceeded, match=r"cluster\.start_timeout_seconds"):
        await server.start(1.5)
    await server.end()
    assert not child_of_is_alive(tmp_path)


async def test_a_server_that_crashes_is_noticed_and_its_children_are_ended(tmp_path):
    server = made(tmp_path, "crashes")
    await server.start(20)
    async with asyncio.timeout(20):
        assert "Segmentation fault" in await server.wait()
    await server.end()
    assert not child_of_is_alive(tmp_path)


def child_of_is_alive(folder: Path) -> bool:
    try:
        return child_of(folder).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.engines.sglang.test_process import made

async def tell(server, folder):
    while len(server._files) < 2:
        await asyncio.sleep(0.05)
    (folder / "looked").touch()

async def main():
    folder = Path(sys.argv[1])
    server = made(folder, sys.argv[2])
    telling = asyncio.create_task(tell(server, folder))
    try:
        await server.start(600)
        await server.wait()
    finally:
        await server.end()

asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["hangs", "serves"])
@pytest.mark.parametrize("victim", ["server", "family", "owner", "owner and server"])
async def test_nothing_of_a_server_is_left_whoever_is_killed_and_when(tmp_path, moment, victim):
    """After its end, or, where its owner was killed too, after the start of the row's next one."""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, str(tmp_path), moment)
    log = tmp_path / "server.log"
    await until(lambda: log.exists() and "kept" in log.read_text(), 30)
    await until((tmp_path / "looked").exists, 30)  # its owner, at the files
    server = psutil.Process(owner.pid).children()[0]
    family = [server, *server.children(recursive=True)]
    assert len(family) == 3, "the server, its child, its resource tracker"
    files = [Path(word) for word in log.read_text().split() if word.startswith("/dev/shm/")]
    assert len(files) == 2
    assert all(file.exists() for file in files)
    if "owner" in victim:
        owner.kill()
    for process in {"family": family, "owner": []}.get(victim, [server]):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    async with asyncio.timeout(30):
        await owner.wait()
    if "owner" in victim:
        own = servers(tmp_path, "serves")
        following = own.make(own.address({}))
        await following.start(30)
        await following.end()
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert [file for file in files if file.exists()] == []


async def test_later_lives_have_the_addresses_of_the_first(tmp_path):
    own = servers(tmp_path, "serves")
    first = own.address({})
    again = own.address(own.told(first))
    assert (again.port, again.receiver) == (first.port, first.receiver)


@pytest.mark.parametrize(
    ("python", "words"),
    [("/nowhere/python", "cannot be run"), (sys.executable, "has no SGLang")],
)
async def test_a_python_that_cannot_run_it_is_refused_with_the_fix(tmp_path, python, words):
    with pytest.raises(UserError, match=words) as refusal:
        await servers(tmp_path, "serves", python).examine()
    assert "deploy/sglang-cpu/install.sh" in str(refusal.value)


@pytest.mark.parametrize("version", ["0.5.19", "0.5.20.post1", "0.4.10"])
def test_an_older_sglang_is_refused_with_what_it_lacks(version):
    with pytest.raises(UserError, match=r"0\.5\.21 is the oldest that will do: before 0\.5\.21 it has no weight update session"):
        check_version(version, where="here")


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23", "0.6.0", "1.0"])
def test_a_newer_one_will_do(version):
    check_version(version, where="here")


async def test_an_attached_server_is_watched_and_left_alone(tmp_path):
    own = made(tmp_path, "serves")
    await own.start(20)
    attached = AttachedServers(own.address.url, None, silence_seconds=0.5)
    await attached.examine()
    server = attached.make(attached.address({}))
    await server.start(5)
    await server.end()
    assert psutil.pid_exists(own.pid)
    silent = asyncio.create_task(server.wait())
    await own.end()
    began = time.monotonic()
    async with asyncio.timeout(15):
        assert "has answered nothing for 0.5 s" in await silent
    assert time.monotonic() - began < 10
    with pytest.raises(UserError, match="no SGLang server answers at"):
        await attached.examine()
