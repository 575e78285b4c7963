"""One SGLang server as a child process: found fit, started, watched, ended without leftovers; or one that somebody else started.

    examine ─▶ make ─▶ start (spawn, until it serves) ─▶ wait (returns when it has ended) ─▶ end

The server dies with the process that started it, however that ends: the kernel sends it SIGKILL. Its own processes bear its mark,
by which whoever ends it, or starts the row's next one, finds those that are left. What it writes goes to a log file, whose last
lines say why it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from asyncrl import processes
from asyncrl.engines.sglang.arguments import ServerOptions, check, command, environment
from asyncrl.errors import DeadlineExceeded, RunError, UserError
from asyncrl.transport import security
from asyncrl.transport.ports import free_port

OLDEST = (0, 5, 21)
TESTED = "0.5.23"
EXAMINE_SECONDS = 90.0
POLL_SECONDS, WATCH_SECONDS, ASK_SECONDS = 0.25, 1.0, 5.0
LOOK_SECONDS = 1.0
KILL_SECONDS = 5.0  # less than cluster.stop_grace_seconds
TAIL_LINES = 12
MARK = "ASYNCRL_SERVER"  # its value: the path of the row's log, one life after the other
_DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"  # 1: PDEATHSIG
_VERSIONS = """
import importlib.metadata as packages, json
def version(name):
    try:
        return packages.version(name)
    except packages.PackageNotFoundError:
        return None
plugins = [point.value for point in packages.entry_points(group="sglang.srt.plugins")]
print(json.dumps({"sglang": version("sglang"), "asyncrl": version("asyncrl"), "plugins": plugins}))
"""
_LIST = """
import argparse, json, runpy, sys
launcher = sys.argv[1]
if launcher:
    runpy.run_path(launcher, run_name="asyncrl_examines")
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([name.lstrip("-") for name in parser._option_string_actions if name.startswith("--")]))
"""


def check_version(version: str, *, where: str) -> None:
    """Raises UserError for an SGLang that is too old."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < OLDEST:
        raise UserError(
            f"SGLang at {where} is {version}, and {'.'.join(map(str, OLDEST))} is the oldest that will do: before 0.5.21 it has "
            f"no weight update session, before 0.5.20 it does not say which version computed a token. Install {TESTED}"
        )


@dataclass(frozen=True)
class Address:
    """Where a server listens: host, port and token of its HTTP; receiver: where its weight receiver does, if it has one."""

    host: str
    port: int
    token: str | None
    receiver: str | None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def _kinds(address: Address) -> dict[str, str]:
    found = {"http": address.url}
    return found if address.receiver is None else {**found, "weights": address.receiver}


class OwnServers:
    """Makes the servers of one row, one life after the other, at the same addresses."""

    def __init__(self, options: ServerOptions, log_path: Path):
        self._options, self._log_path = options, log_path

    def address(self, earlier: Mapping[str, str]) -> Address:
        """Where the row's servers listen; earlier: where they did, by kind, for an earlier process of the row."""
        door = security.door()
        port, receiver = (urlsplit(earlier.get(kind, "")).port or free_port(door.host) for kind in ("http", "weights"))
        return Address(door.host, port, door.token, f"tcp://{door.host}:{receiver}")

    async def examine(self) -> None:
        """See that this Python can run such a server. Raises UserError that says what is missing and how to get it."""
        options = self._options
        found = json.loads(await _ask_python(options, _VERSIONS))
        version = found["sglang"]
        if version is None:
            raise UserError(
                f"inference.engine is sglang, but {options.python} has no SGLang: install it there (on a GPU machine pip install "
                "'asyncrl[sglang]', without one bash deploy/sglang-cpu/install.sh) and set inference.python to that Python"
            )
        check_version(version, where=options.python)
        if not any(point.startswith("asyncrl.") for point in found["plugins"]):
            raise UserError(
                f"asyncrl's receiver runs inside the servers, and {options.python} has no asyncrl: install it there "
                "(pip install --no-deps asyncrl)"
            )
        if options.further:
            check(options.further, json.loads(await _ask_python(options, _LIST, options.launcher or "")))

    def told(self, address: Address) -> dict[str, str]:
        """By kind, as others reach it."""
        return {kind: security.door().known_as(place) for kind, place in _kinds(address).items()}

    def make(self, address: Address) -> SglangProcess:
        """A server, not started."""
        return SglangProcess(self._options, address, self._log_path)


class SglangProcess:
    """A server that this process owns. One event loop uses it."""

    def __init__(self, options: ServerOptions, address: Address, log_path: Path):
        self._options, self.address, self._log_path = options, address, log_path
        self._process: asyncio.subprocess.Process | None = None
        self._files: set[Path] = set()  # in shared memory, as far as they were seen

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def model_path(self) -> str:
        return self._options.model_path

    async def start(self, seconds: float) -> None:
        """Spawn it, and return when it serves; what an earlier owner of the row left is ended before. Raises RunError, with the
        last lines of its log, when it ends before, and DeadlineExceeded when it takes longer than `seconds`."""
        await self._kill()
        address = self.address
        arguments = command(self._options, host=address.host, port=address.port, token=address.token)
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_JOB_ID")}
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                self._options.python,
                "-c",
                _DIE_WITH_PARENT,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**inherited, **environment(self._options, receiver=address.receiver), MARK: self._mark},
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(seconds):
                await self._until_ready()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the SGLang server did not serve within {seconds:g} s (cluster.start_timeout_seconds); its log ends:\n"
                f"{self.tail()}"
            ) from None
        self._look_around()

    async def wait(self) -> str:
        """Until the server has ended by itself; how, with the end of its log."""
        assert self._process is not None, "start first"
        code = await self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the SGLang server ended ({how}); its log ends:\n{self.tail()}"

    async def load(self) -> dict[str, float]:
        """What it reports of its work; nothing while it does not answer."""
        return await _load(self.address)

    async def end(self) -> None:
        """It and all its processes are gone afterwards, and so are their files in shared memory. By SIGKILL: nothing of a server
        need be kept, and SGLang's own end kills what would have cleared up."""
        if self._process is None:
            return
        await self._kill()
        await self._process.wait()
        for path in self._files:
            path.unlink(missing_ok=True)
        self._process, self._files = None, set()

    @property
    def _mark(self) -> str:
        return str(self._log_path.resolve())

    async def _kill(self) -> None:
        """What bears the mark, whoever started it."""
        find = functools.partial(processes.marked, MARK, self._mark)
        await asyncio.get_running_loop().run_in_executor(None, functools.partial(processes.kill, find, seconds=KILL_SECONDS))

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self._log_path.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-TAIL_LINES:])

    async def _until_ready(self) -> None:
        """Raises RunError when it ends before."""
        assert self._process is not None
        async with _session(self.address) as session:
            ended = asyncio.ensure_future(self._process.wait())
            answers = asyncio.ensure_future(_until_it_answers(session, f"{self.address.url}/health"))
            try:
                while not (await asyncio.wait([ended, answers], timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED))[0]:
                    self._look_around()
                if not answers.done():
                    raise RunError(await self.wait())
            finally:
                ended.cancel()
                answers.cancel()
                await asyncio.gather(ended, answers, return_exceptions=True)

    def _look_around(self) -> None:
        """Note its files while they can be seen: of a process that was killed nobody can tell any more."""
        self._files |= processes.shared_files(processes.marked(MARK, self._mark))


class AttachedServers:
    """A server that somebody else started, and ends."""

    def __init__(self, url: str, receiver: str | None, *, silence_seconds: float):
        self._url, self._receiver, self._silence_seconds = url, receiver, silence_seconds

    def address(self, earlier: Mapping[str, str]) -> Address:
        parts = urlsplit(self._url)
        return Address(parts.hostname or "", parts.port or 80, security.door().token, self._receiver)

    async def examine(self) -> None:
        """Raises UserError where no fit server answers."""
        found = await server_info(self._url, security.door().token)
        check_version(str(found.get("version")), where=self._url)

    def told(self, address: Address) -> dict[str, str]:
        return _kinds(address)

    def make(self, address: Address) -> AttachedServer:
        return AttachedServer(address, self._silence_seconds)


class AttachedServer:
    """As `SglangProcess`, but nothing is started and nothing is ended: it is only looked at."""

    def __init__(self, address: Address, silence_seconds: float):
        self.address, self._silence_seconds = address, silence_seconds

    async def start(self, seconds: float) -> None:
        """Until it answers. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(seconds), _session(self.address) as session:
                await _until_it_answers(session, f"{self.address.url}/model_info")
        except TimeoutError:
            raise DeadlineExceeded(f"the SGLang server at {self.address.url} did not answer within {seconds:g} s") from None

    async def wait(self) -> str:
        """Until it has answered nothing for silence_seconds."""
        clock = asyncio.get_running_loop().time
        heard = clock()
        async with _session(self.address) as session:
            while clock() - heard <= self._silence_seconds:
                await asyncio.sleep(WATCH_SECONDS)
                if await _answers(session, f"{self.address.url}/model_info"):
                    heard = clock()
        return f"the SGLang server at {self.address.url} has answered nothing for {self._silence_seconds:g} s"

    async def load(self) -> dict[str, float]:
        return await _load(self.address)

    async def end(self) -> None:
        """It goes on."""


def _session(address: Address) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {address.token}"} if address.token is not None else {}
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=ASK_SECONDS))


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _until_it_answers(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        if await _answers(session, url):
            return
        await asyncio.sleep(POLL_SECONDS)


async def _load(address: Address) -> dict[str, float]:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError):
        async with _session(address) as session, session.get(f"{address.url}/v1/loads") as answer:
            return load_of(await answer.json())
    return {}


def load_of(answer: Mapping[str, Any]) -> dict[str, float]:
    """Requests running and waiting, share of the KV memory in use and tokens per second, over a server's replicas, from its
    answer to /v1/loads."""
    replicas = answer["loads"]
    return {
        "running": sum(int(each["num_running_reqs"]) for each in replicas),
        "waiting": sum(int(each["num_waiting_reqs"]) for each in replicas),
        "kv_use": max((float(each["token_usage"]) for each in replicas), default=0.0),
        "tokens_per_second": sum(float(each["gen_throughput"]) for each in replicas),
    }


async def server_info(url: str, token: str | None) -> dict[str, Any]:
    """What a running server says of itself. Raises UserError where none answers."""
    parts = urlsplit(url)
    try:
        address = Address(parts.hostname or "", parts.port or 80, token, None)
        async with _session(address) as session, session.get(f"{url}/server_info") as answer:
            answer.raise_for_status()
            return dict(await answer.json())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise UserError(
            f"no SGLang server answers at {url} ({str(error) or type(error).__name__}): start it, or correct inference.attach"
        ) from error


async def _ask_python(options: ServerOptions, program: str, *arguments: str) -> str:
    """What a program prints, run by the server's Python."""
    try:
        process = await asyncio.create_subprocess_exec(
            options.python,
            "-c",
            program,
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment(options, receiver=None)},
        )
    except OSError as error:
        raise UserError(
            f"inference.python is {options.python}, which cannot be run ({error.strerror or error}): name the Python of an "
            "environment with SGLang (bash deploy/sglang-cpu/install.sh makes one for machines without a GPU)"
        ) from error
    try:
        async with asyncio.timeout(EXAMINE_SECONDS):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        raise UserError(f"{options.python} did not answer within {EXAMINE_SECONDS:g} s: see whether it works") from None
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise UserError(
            f"{options.python} cannot say what its SGLang is ({' '.join(last)}): see whether that environment is whole"
        )
    return output.decode().strip().splitlines()[-1]
