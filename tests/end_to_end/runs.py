"""How end-to-end tests start and watch a run: the real command, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "pipelines" / "quickstart.yaml"
SHORT = ("training.steps=6", "eval.every=0", "eval.samples=64", "training.groups_per_step=4", "rollout.max_concurrent=64")


class Launched:
    """A run under test: its process, its folder, and what it left."""

    def __init__(self, run_dir: Path, *sets: str, short: bool = True, pipeline: Path = QUICKSTART):
        self.run_dir = run_dir
        overrides = [*(SHORT if short else ()), f"tracking.mlflow.uri=sqlite:///{run_dir.parent}/mlflow.db", *sets]
        command = [sys.executable, "-m", "asyncrl.cli", "launch", str(pipeline), "--run-dir", str(run_dir)]
        for override in overrides:
            command += ["--set", override]
        self.output = run_dir.parent / f"{run_dir.name}.out"
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                command, cwd=run_dir.parent, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ}
            )

    def wait(self, seconds: float = 150) -> int:
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                kill_tree(self.process.pid)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    @property
    def started(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "run.json").read_text()))

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def lines_so_far(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file that is being written, or cut, just now."""
        path = self.run_dir / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for it, unless the run ends first."""
        until(lambda: condition() or self.process.poll() is not None, seconds, what)
        assert self.process.poll() is None, self.text

    def command(self, name: str, *options: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        return asyncrl(*name.split(), str(self.run_dir), *options, seconds=seconds)

    def status(self) -> dict[str, Any]:
        answer = self.command("status", "--json")
        return dict(json.loads(answer.stdout)) if answer.returncode == 0 else {}

    def until_step(self, step: int, seconds: float = 120) -> None:
        """Wait until that many steps are in metrics.jsonl."""
        until(lambda: len(self.lines("metrics.jsonl")) >= step or self.process.poll() is not None, seconds, f"step {step}")
        assert self.process.poll() is None, self.text


def asyncrl(*arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", *arguments], capture_output=True, text=True, timeout=seconds, check=False
    )


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.05)


def pids_of(status: dict[str, Any]) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in status["services"] if row["pid"]}


def leftovers(run_dir: Path) -> list[str]:
    """Processes that still name the run's folder or id, and its shared memory."""
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    left = [f"shared memory {path.name}" for path in Path("/dev/shm").glob(f"asyncrl-{run_id}-*")]
    return left + [f"process {process.pid} {process.name()}" for process in processes_with_open_files_under(run_dir)]


def processes_with_open_files_under(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(file.path.startswith(f"{folder}/") for file in process.open_files()):
                yield process
        except psutil.Error:
            continue


def listening_at(run: Launched) -> set[str]:
    """Addresses at which processes of the run, Ray's included, take connections."""
    mark, own = f"ASYNCRL_RUN_ID={run.started['run_id']}".encode(), {run.process.pid}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                own.update((process.pid, *(child.pid for child in process.children(recursive=True))))
    found = [connection for connection in psutil.net_connections("inet") if connection.pid in own]
    return {each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN}


def kill_tree(pid: int) -> None:
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
