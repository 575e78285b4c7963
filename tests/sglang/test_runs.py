"""Whole runs on real servers: one learns, and one goes on when a server is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from asyncrl import processes
from asyncrl.data.builtin import arithmetic
from asyncrl.engines.builtin import prepare
from asyncrl.engines.sglang.process import MARK
from tests.end_to_end.runs import ROOT, Launched, asyncrl, leftovers, pids_of, until
from tests.sglang.servers import LAUNCHER, PYTHON, serving

PIPELINE = ROOT / "pipelines" / "quickstart_sglang_cpu.yaml"
SERVERS = (f"inference.python={PYTHON}", f"inference.launcher={LAUNCHER}")
SHORT = ("training.steps=40", "eval.every=0", "eval.samples=64", "training.groups_per_step=4", "rollout.max_concurrent=64")


def launched(folder: Path, *sets: str) -> Launched:
    return Launched(folder / "run", *SERVERS, *sets, short=False, pipeline=PIPELINE)


def server_processes(owner: int) -> list[psutil.Process]:
    """Of the server that this process owns."""
    return [process for process in psutil.Process(owner).children(recursive=True) if "sglang" in " ".join(process.cmdline())]


def bearing_a_mark(folder: Path) -> list[int]:
    """Processes of the servers of a run in this folder."""
    mark = f"{MARK}={folder}".encode()
    return [pid for pid in processes.all_processes() if mark in processes.read(pid, "environ")]


@pytest.mark.timeout(300)
def test_a_run_goes_on_when_one_of_two_servers_is_killed_and_it_comes_back_with_the_current_version(tmp_path):
    run, files = launched(tmp_path, *SHORT, "inference.servers=2", "inference.max_batch=32", "training.steps=4000"), set()
    try:
        run.until_step(10, 200)
        files |= processes.shared_files(bearing_a_mark(tmp_path))
        owner = pids_of(run.status())["inference/1"]
        for process in server_processes(owner):
            process.send_signal(signal.SIGKILL)
        until(lambda: state(run, "inference/1") == "restarting", 20, "its owner starts it again")
        until(lambda: "sglang::scheduler" in titles(owner), 60, "it starts")
        server_processes(owner)[0].kill()
        until(lambda: "sglang::scheduler" not in titles(owner), 10, "what it had started is ended too")
        before = len(run.lines("metrics.jsonl"))
        until(lambda: len(run.lines("metrics.jsonl")) > before + 5, 60, "steps without it")
        until(lambda: state(run, "inference/1") == "serving" and version(run, "inference/1") is not None, 120, "it is back")
        files |= processes.shared_files(bearing_a_mark(tmp_path))
        shown = run.command("servers list")
        assert shown.returncode == 0, shown.stderr
        assert "inference/1" in shown.stdout
        assert run.command("stop").returncode == 0
        assert run.wait(60) == 130, run.text
    finally:
        end(run)
    assert run.summary["samples"]["failed"] == 0, "no trajectory was lost"
    assert run.summary["sync"]["verified"] is True
    assert run.summary["staleness"]["max"] <= run.summary["staleness"]["bound"]
    assert run.command("audit").returncode == 0
    until(lambda: leftovers(run.run_dir) == [], 10, "a clean end")
    assert len(files) >= 4, "each server has a file and a semaphore"
    assert bearing_a_mark(tmp_path) == []
    assert [file for file in files if file.exists()] == []


def titles(owner: int) -> set[str]:
    """Of the processes below this one."""
    return {
        processes.read(process.pid, "cmdline").decode().strip("\0 ") for process in psutil.Process(owner).children(recursive=True)
    }


@pytest.mark.timeout(300)
async def test_a_run_attaches_to_a_server_of_somebody_else_and_another_joins_and_leaves_it(tmp_path):
    """Nothing of either server is touched when the run has ended."""
    model = prepare("builtin/arithmetic", arithmetic.examples(), seed=0)
    sizes = {"context_tokens": 64, "max_batch": 32}
    async with AsyncExitStack() as stack:
        first, second = await asyncio.gather(
            *(stack.enter_async_context(serving(model, tmp_path, name=f"server-{name}", **sizes)) for name in ("a", "b"))
        )
        attach = f"inference.attach=[{{url: '{first.url}', receiver: '{first.receiver}'}}]"
        run = Launched(
            tmp_path / "run", *SHORT, "training.steps=100000", "inference.python=null", "inference.launcher=null",
            "inference.max_batch=128", attach, short=False, pipeline=PIPELINE,
        )  # fmt: skip
        try:
            await asyncio.to_thread(run.until_step, 5, 100)
            added = await asyncio.to_thread(
                asyncrl, "servers", "add", str(run.run_dir), second.url, "--receiver", second.receiver
            )
            assert added.returncode == 0, added.stderr
            assert "inference/1" in added.stdout
            await asyncio.to_thread(until, lambda: servers(run)["inference/1"] in ("READY", "UPDATING"), 20, "it takes part")
            twice = await asyncio.to_thread(
                asyncrl, "servers", "add", str(run.run_dir), second.url, "--receiver", second.receiver
            )
            assert (twice.returncode, "has the server at" in twice.stderr) == (2, True)
            removed = await asyncio.to_thread(asyncrl, "servers", "remove", str(run.run_dir), "inference/0")
            assert removed.returncode == 0, removed.stderr
            assert servers(run)["inference/0"] == "RETIRED"
            last = await asyncio.to_thread(asyncrl, "servers", "remove", str(run.run_dir), "inference/1")
            assert (last.returncode, "the run's last server" in last.stderr) == (2, True)
            before = len(run.lines("metrics.jsonl"))
            await asyncio.to_thread(until, lambda: len(run.lines("metrics.jsonl")) > before + 5, 60, "steps on the other alone")
            stopped = await asyncio.to_thread(run.command, "stop")
            assert stopped.returncode == 0
            assert await asyncio.to_thread(run.wait, 60) == 130, run.text
        finally:
            await asyncio.to_thread(end, run)
        assert run.summary["sync"]["verified"] is True
        assert (await asyncio.to_thread(run.command, "audit")).returncode == 0
        for server in (first, second):
            assert await server.process.load(), "it goes on serving"


def servers(run: Launched) -> dict[str, str]:
    return {server["name"]: server["state"] for server in json.loads(run.command("servers list", "--json").stdout)["servers"]}


def state(run: Launched, name: str) -> str | None:
    return row(run, name).get("state")


def version(run: Launched, name: str) -> int | None:
    return row(run, name).get("version")


def row(run: Launched, name: str) -> dict:
    return next((each for each in run.status().get("services", []) if each["name"] == name), {})


def end(run: Launched) -> None:
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
        run.wait(60)


@pytest.mark.long
@pytest.mark.timeout(700)
def test_the_quickstart_learns_on_a_real_server(tmp_path):
    run = launched(tmp_path)
    assert run.wait(600) == 0, run.text
    summary = run.summary
    assert summary["eval"]["last"] - summary["eval"]["first"] >= 0.3
    assert summary["sync"]["verified"] is True
    assert 1 <= summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert run.command("audit").returncode == 0


@pytest.mark.long
@pytest.mark.timeout(400)
def test_without_any_server_left_the_run_ends_with_a_sentence_that_says_so(tmp_path):
    """Every life of the only server is killed before it serves again."""
    run = launched(tmp_path, *SHORT, "training.steps=100000")
    try:
        run.until_step(5, 200)
        owner = pids_of(run.status())["inference/0"]
        while run.process.poll() is None:
            for process in server_processes(owner) if psutil.pid_exists(owner) else ():
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(1)
        assert run.process.returncode == 1
    finally:
        end(run)
    assert "no inference server is left and none comes back" in run.summary["error"]
    assert "no inference server is left" in run.text
    assert asyncrl("audit", str(run.run_dir)).returncode == 0


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_goes_on_when_the_process_that_owns_a_server_is_killed(tmp_path):
    """Its server ends with it; another owner starts another."""
    run = launched(tmp_path, *SHORT, "inference.servers=2", "inference.max_batch=32", "training.steps=4000")
    try:
        run.until_step(10, 200)
        owner = pids_of(run.status())["inference/0"]
        served = server_processes(owner)
        psutil.Process(owner).kill()
        until(lambda: not any(process.is_running() for process in served), 60, "the first one's server is ended")
        until(lambda: pids_of(run.status()).get("inference/0", owner) != owner, 120, "another owner, whose server is up")
        until(lambda: state(run, "inference/0") == "serving" and version(run, "inference/0") is not None, 60, "it serves")
        before = len(run.lines("metrics.jsonl"))
        until(lambda: len(run.lines("metrics.jsonl")) > before + 5, 60, "steps with both")
        assert run.command("stop").returncode == 0
        assert run.wait(60) == 130, run.text
    finally:
        end(run)
    assert run.summary["samples"]["failed"] == 0, "no trajectory was lost"
    assert run.summary["sync"]["verified"] is True
    assert run.command("audit").returncode == 0
    until(lambda: leftovers(run.run_dir) == [], 10, "a clean end")
    assert bearing_a_mark(tmp_path) == []


@pytest.mark.long
@pytest.mark.timeout(400)
def test_beyond_loopback_a_server_answers_the_run_alone(tmp_path):
    """HTTP with the run's token, weights under the run's keys."""
    run = launched(tmp_path, *SHORT, "training.steps=100000", "cluster.bind_address=0.0.0.0")
    try:
        run.until_step(5, 200)
        [server] = json.loads(run.command("servers list", "--json").stdout)["servers"]
        assert "127.0.0.1" not in server["url"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server['url']}/model_info", timeout=10)
        assert refused.value.code == 401
        refused.value.close()
        assert run.command("stop").returncode == 0
        assert run.wait(60) == 130, run.text
    finally:
        end(run)
    assert run.summary["sync"]["verified"] is True
    assert run.summary["staleness"]["max"] >= 1, "new versions came through"
    assert run.command("audit").returncode == 0
