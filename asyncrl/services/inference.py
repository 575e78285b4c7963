"""An inference server of a run: the embedded engine, its HTTP front and its weight receiver in one process.

    rollouter ──http──▶ HttpFront ──▶ EngineLoop (thread) ◀──commit── receiver (threads) ◀──weights── ParameterSync

| loop         | consumes    | waits for                | is unblocked by                    |
|--------------|-------------|--------------------------|------------------------------------|
| run          | –           | stop, or the engine's end | `stop`; the engine thread's death |
| engine loop  | requests    | see engines/embedded/loop | see there                         |
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from asyncrl.engines.embedded import EmbeddedServer, EngineOptions
from asyncrl.errors import RunError, UserError
from asyncrl.protocols import PolicyVersion, WeightTarget
from asyncrl.services.service import NOWHERE, AddressBook, service_rpc
from asyncrl.transport import security
from asyncrl.transport.ports import free_port

log = logging.getLogger(__name__)
WATCH_SECONDS = 0.25


class WeightReceiver(Protocol):
    """What takes new versions in and commits them to a target. Either method may be a coroutine function."""

    def start(self, bind: str | None = None) -> Any:
        """Bind, at this address or a free one; returns the address."""

    def close(self) -> Any: ...

    @property
    def alive(self) -> bool:
        """False when it takes no version any more, though nobody closed it."""


class InferenceServer:
    """Service of row `inference/i`. `make_receiver` builds the weight receiver around the loaded engine."""

    def __init__(
        self,
        name: str,
        model_path: str | Path,
        options: EngineOptions,
        *,
        make_receiver: Callable[[WeightTarget], WeightReceiver] | None,
        port: int = 0,
    ):
        self.name = name
        self._server = EmbeddedServer(model_path, options)
        self._make_receiver = make_receiver
        self._receiver: WeightReceiver | None = None
        self._port = port
        self._rpc = service_rpc(self)
        self._stopping = asyncio.Event()
        self._state = "starting"

    async def start(self, earlier: Mapping[str, str] = NOWHERE) -> dict[str, str]:
        """Load the model and bind. Raises UserError for a model that cannot be served."""
        door = security.door()
        port = (urlsplit(earlier["http"]).port if "http" in earlier else None) or self._port or free_port(door.host)
        addresses = {"http": door.known_as(await self._server.start(door.host, port, token=door.token))}
        if self._make_receiver is not None:
            self._receiver = self._make_receiver(self._server.engine)
            addresses["weights"] = str(await _maybe_await(self._receiver.start(earlier.get("weights"))))
        addresses["rpc"] = await self._rpc.start(earlier.get("rpc"))
        self._state = "ready"
        return addresses

    async def run(self, book: AddressBook) -> None:
        """Serve until `stop`. Raises RunError when the engine's loop ends by itself."""
        self._state = "serving"
        try:
            while not self._stopping.is_set():
                if not self._server.engine.alive:
                    raise RunError(f"the decode loop ended: {self._server.engine.failure!r}")
                if self._receiver is not None and not self._receiver.alive:
                    raise RunError("the weight receiver ended: no version can arrive any more; the log has its traceback")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_SECONDS):
                        await self._stopping.wait()
        finally:
            await self._close()

    async def stop(self) -> None:
        self._stopping.set()

    async def _close(self) -> None:
        self._state = "stopped"
        if self._receiver is not None:
            await _maybe_await(self._receiver.close())
        await self._server.close()
        await self._rpc.close()

    def status(self) -> dict[str, Any]:
        if not self._server.started:
            return {"state": self._state, "version": None}
        running, waiting = self._server.engine.load()
        stats = self._server.engine.stats
        return {
            "state": self._state,
            "version": version_number(self._server.engine.version),
            "running": running,
            "waiting": waiting,
            "tokens": stats.generated_tokens,
            "forward_cpu_seconds": stats.forward_cpu_seconds,
            "tokens_per_decode_second": stats.generated_tokens / stats.decode_seconds if stats.decode_seconds else 0.0,
        }

    def summary(self) -> dict[str, Any]:
        if not self._server.started:
            return {}
        stats = self._server.engine.stats
        pauses = sorted(1e3 * pause for pause in stats.pauses)
        figures = {
            "tokens": stats.generated_tokens,
            "prefilled_tokens": stats.prefilled_tokens,
            "decode_steps": stats.decode_steps,
            "decode_seconds": stats.decode_seconds,
            "forward_cpu_seconds": stats.forward_cpu_seconds,
            "finished": stats.finished,
            "aborted": stats.aborted,
            "commits": len(pauses),
            "pause_ms_p50": statistics.median(pauses) if pauses else 0.0,
        }
        return {"servers": {self.name: figures}}


def version_number(text: str) -> int | None:
    """The version in a server's `weight_version`; None before the first update."""
    return PolicyVersion.parse(text).version if "." in text else None


async def _maybe_await(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def serve(
    model_path: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    options: EngineOptions | None = None,
    token: str | None = None,
) -> int:
    """`asyncrl serve`: serve one model until SIGINT or SIGTERM; the exit code. token: what every request must bring. Raises
    UserError."""
    return asyncio.run(_serve(model_path, host, port, options or EngineOptions(), token))


async def _serve(model_path: str | Path, host: str, port: int, options: EngineOptions, token: str | None) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    server = EmbeddedServer(model_path, options)
    try:
        url = await server.start(host, port, token=token)
    except OSError as error:
        raise UserError(
            f"--port is {port} on --host {host}, which cannot be bound ({error.strerror or error}): choose another"
        ) from error
    header = "" if token is None else '-H "Authorization: Bearer $ASYNCRL_TOKEN" '
    print(f"{model_path} is served at {url} (SGLang's protocol; Ctrl-C ends it)", flush=True)
    print(
        f"  curl {url}/generate -H 'Content-Type: application/json' {header}"
        '-d \'{"text": "1+2+3=", "sampling_params": {"max_new_tokens": 8}}\'',
        flush=True,
    )
    try:
        while not stopping.is_set() and server.engine.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await stopping.wait()
    finally:
        await server.close()
    if server.engine.failure is not None:
        print(f"the decode loop ended: {server.engine.failure!r}", file=sys.stderr)
        return 1
    return 0
