"""The one kind of actor: a process that becomes a row of the run.

    main thread   load() / start() / run() wait here for results        (Ray calls them, in this order)
    loop thread   the service's event loop, running from `start` on, so that remote calls are answered at all times

An exception of the service crosses Ray's channel as plain text (no class of ours is pickled), with the traceback in the log.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from asyncrl import logs
from asyncrl.cluster.spec import RunSpec
from asyncrl.errors import UserError
from asyncrl.services.service import AddressBook, Service
from asyncrl.services.supervisor import Life, Row
from asyncrl.transport import security
from asyncrl.transport.allocator import few_arenas
from asyncrl.transport.hosts import is_loopback

log = logging.getLogger(__name__)
GARBAGE_OBJECTS = 20_000  # containers made and not freed before the collector looks at the young ones; Python's own is 700
COLLECT_SECONDS = 30.0


def limit_threads() -> None:
    """One thread per process: more make neighbours spin for each other's cores. Before torch or numpy is imported."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = os.environ.get("ASYNCRL_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class ServiceHost:
    """Hosts one service. Methods return ("ok", value), ("failed", "Type: text") or, for a user's mistake, ("refused", text)."""

    def __init__(self, spec: RunSpec, row: Row, life: Life):
        limit_threads()
        few_arenas()
        sys.path[:0] = [path for path in spec.import_paths if path not in sys.path]
        logs.log_to_file(Path(spec.run_dir), row.name)
        log.info("%s is process %d on %s", row.name, os.getpid(), socket.gethostname())
        self._spec, self._row, self._life = spec, row, life
        self._loop = _new_loop()
        threading.Thread(target=self._loop.run_forever, name="service-loop", daemon=True).start()
        self._service: Service | None = None

    def identify(self) -> tuple[int, str]:
        """(pid, host), known before the service is."""
        return os.getpid(), socket.gethostname()

    def load(self) -> None:
        """Import what the service is made of. What goes wrong here goes wrong again in `start`, and is told there."""
        from asyncrl.cluster import assembly

        assembly.load(self._spec, self._row)

    def start(self) -> tuple[str, Any]:
        """The service's addresses, with ``pid`` and ``host`` among them."""
        return self._guarded(self._start())

    def run(self, book: AddressBook) -> tuple[str, Any]:
        """The service's summary, once its work is over."""
        return self._guarded(self._run(book))

    async def _start(self) -> dict[str, str]:
        from asyncrl.cluster.assembly import assemble

        security.enter(_door_of(self._spec))
        self._service = assemble(self._spec, self._row, self._life)
        addresses = await self._service.start(self._life.earlier)
        return {**addresses, "pid": str(os.getpid()), "host": socket.gethostname()}

    async def _run(self, book: AddressBook) -> dict[str, Any]:
        assert self._service is not None, "run before start"
        _collect_less()
        collecting = asyncio.create_task(_collect_now_and_then())
        await self._service.run(book)
        collecting.cancel()
        log.info("%s is done", self._row.name)
        return self._service.summary()

    def _guarded(self, work: Coroutine[Any, Any, Any]) -> tuple[str, Any]:
        try:
            return "ok", asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except UserError as mistake:
            log.error("%s refuses: %s", self._row.name, mistake)
            return "refused", str(mistake)
        except Exception as error:  # the boundary of the process: reported to the supervisor, which ends the run by this name
            log.exception("%s failed", self._row.name)
            return "failed", f"{type(error).__name__}: {error}"


def _door_of(spec: RunSpec) -> security.Door:
    """Where several hosts take part, Ray knows how this one is reached."""
    import ray

    node = ray.util.get_node_ip_address()
    return security.open_door(
        Path(spec.run_dir), spec.parsed_config().cluster.bind_address, node_address=None if is_loopback(node) else node
    )


def _collect_less() -> None:
    """Libraries and models are there to stay: the collector need not walk over them again, and may wait for more garbage. What
    makes up the traffic has no cycles and is freed without it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)


async def _collect_now_and_then() -> None:
    """Without a full collection Python keeps thousands of freed tuples of each length for later ones, and the pages that they lie
    on; by itself it comes to one less and less often."""
    while True:
        await asyncio.sleep(COLLECT_SECONDS)
        gc.collect()


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def prepare_builtin_model(spec: RunSpec) -> str:
    """Make and warm up the built-in model that the configuration names, if it is not there yet; its folder."""
    limit_threads()
    from asyncrl.cluster.assembly import model_folder

    return str(model_folder(spec.parsed_config().model.path))
