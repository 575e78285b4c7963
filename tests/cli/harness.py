"""The command in this process, with its output and exit code; and run directories as a run leaves them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.cli import main
from asyncrl.config.load import load_config
from asyncrl.services.supervisor.summary import empty_summary
from asyncrl.services.supervisor.supervisor import EXIT_CODES
from asyncrl.transport.rpc import RpcServer

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def asyncrl(*arguments: str | Path) -> Outcome:
    """Run `asyncrl ARGUMENTS` in this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["asyncrl", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as left:
        return Outcome(left.code if isinstance(left.code, int) else 0, out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
    raise AssertionError("main always exits")


def summary(**changes: Any) -> dict[str, Any]:
    """A summary.json as the supervisor writes it."""
    values = {**empty_summary(load_config(QUICKSTART).config), "status": "finished", "steps": 300, **changes}
    return {**values, "exit_code": EXIT_CODES[values["status"]]}


def ended_run(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary(**changes)))
    return folder


@contextmanager
def live_run(folder: Path, handlers: dict[str, Callable[..., Any]]) -> Iterator[Path]:
    """A run directory whose launcher is this process, answering calls from a thread."""
    folder.mkdir(exist_ok=True)
    loop, up, ended, address = asyncio.new_event_loop(), threading.Event(), asyncio.Event(), ""

    async def serve() -> None:
        nonlocal address
        server = RpcServer(handlers)
        address = await server.start()
        up.set()
        await ended.wait()
        await server.close()

    def main_of_thread() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=main_of_thread)
    thread.start()
    try:
        assert up.wait(10), "the server came up"
        started = {"pid": os.getpid(), "rpc": address, "started": 2e9, "run_id": "abc", "name": "sums"}
        (folder / "run.json").write_text(json.dumps(started))
        yield folder
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
