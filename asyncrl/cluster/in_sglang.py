"""The plugin that SGLang finds in every environment that has asyncrl, and that does nothing in servers that do not ask for it.

    ASYNCRL_RECEIVER=tcp://127.0.0.1:21000 python -m sglang.launch_server …

makes each scheduler process of that server run a weight receiver, the first tensor-parallel rank at this address. Loads torch,
numpy, pyzmq, msgpack and sglang only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def plugin() -> None:
    """Entry point of the group ``sglang.srt.plugins``. A server that asks for a receiver and cannot have one does not start."""
    from asyncrl.engines.sglang.arguments import COMMIT_SECONDS, RECEIVER, RUN_DIR

    address = os.environ.get(RECEIVER)
    if not address:
        return
    from asyncrl.engines.sglang.hooks import install
    from asyncrl.engines.sglang.target import SchedulerTarget
    from asyncrl.transport import security
    from asyncrl.weight_sync.receiver import WeightReceiver

    def serve(target: SchedulerTarget, rank: int) -> WeightReceiver:
        scheme, host, port = _parts(address)
        run_dir = os.environ.get(RUN_DIR)
        if run_dir:
            security.enter(security.open_door(Path(run_dir), host))
        receiver = WeightReceiver(target, bind=f"{scheme}://{host}:{port + rank}")
        receiver.start()
        return receiver

    try:
        install(serve, commit_seconds=float(os.environ.get(COMMIT_SECONDS, "60")))
    except AttributeError as error:  # SGLang takes an exception of a plugin down in its log, and goes on without it
        sys.exit(f"asyncrl's receiver does not fit this SGLang ({error}): use one that was tested with it, or sync.mode disk")


def _parts(address: str) -> tuple[str, str, int]:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    return scheme, host, int(port)
