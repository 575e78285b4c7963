"""The command line and the environment of an SGLang server. Pure.

What asyncrl decides itself (model, address, dtype, lengths, devices) cannot be set again among the further arguments; those are
held against the server's own list before it is started.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from asyncrl.errors import UserError

Value = str | int | float | bool | None
OWN = {
    "model-path": "model.path",
    "tokenizer-path": "model.tokenizer",
    "dtype": "model.dtype",
    "trust-remote-code": "model.trust_remote_code",
    "context-length": "inference.context_tokens",
    "max-running-requests": "inference.max_batch",
    "tp-size": "inference.tensor_parallel",
    "tensor-parallel-size": "inference.tensor_parallel",
    "mem-fraction-static": "inference.memory_fraction",
    "host": "cluster.bind_address",
    "port": "",
    "api-key": "",
    "weight-version": "",
    "device": "",
    "incremental-streaming-output": "",
}
"""Arguments that asyncrl sets, and by which key of pipeline.yaml; "" where there is none."""
EVERYWHERE: Mapping[str, Value] = {"sleep-on-idle": True, "log-level": "warning", "skip-server-warmup": True}
"""An idle server leaves its core to its neighbours; what it says of every batch fills disks; the text of its own first request
may be longer than the run's context."""
CPU: Mapping[str, Value] = {"attention-backend": "torch_native", "sampling-backend": "pytorch", "grammar-backend": "none"}
"""Backends that torch alone can compute, for a machine without a GPU."""
RECEIVER, RUN_DIR, COMMIT_SECONDS = "ASYNCRL_RECEIVER", "ASYNCRL_RECEIVER_RUN_DIR", "ASYNCRL_COMMIT_SECONDS"
"""Environment of a server whose scheduler is to run a weight receiver: where it listens; the folder with the run's keys, needed
beyond loopback; the deadline of a swap."""
_CACHED_BATCHES = 4  # key-value memory on a CPU, in full batches: the running one, and prefixes worth keeping


@dataclass(frozen=True)
class ServerOptions:
    """One server. `python`, `launcher`: what runs it (launcher None: ``-m sglang.launch_server``); `further`: arguments by their
    long names, without dashes in front."""

    python: str
    launcher: str | None
    model_path: str
    dtype: str
    context_tokens: int
    max_batch: int
    device: str
    tokenizer: str | None = None
    trust_remote_code: bool = False
    tensor_parallel: int = 1
    memory_fraction: float | None = None
    further: Mapping[str, Value] = field(default_factory=dict)
    run_dir: str | None = None
    commit_seconds: float = 60.0


def command(options: ServerOptions, *, host: str, port: int, token: str | None) -> list[str]:
    """The whole command line."""
    own: dict[str, Value] = {
        "model-path": options.model_path,
        "tokenizer-path": options.tokenizer,
        "host": host,
        "port": port,
        "dtype": options.dtype,
        "device": options.device,
        "context-length": options.context_tokens,
        "max-running-requests": options.max_batch,
        "tp-size": options.tensor_parallel,
        "mem-fraction-static": options.memory_fraction,
        "trust-remote-code": options.trust_remote_code,
        "api-key": token,
        "incremental-streaming-output": True,
    }
    defaults: dict[str, Value] = dict(EVERYWHERE)
    if options.device == "cpu":
        defaults |= {**CPU, "max-total-tokens": _CACHED_BATCHES * options.max_batch * options.context_tokens}
    further = {plain(name): value for name, value in options.further.items()}
    starter = [options.launcher] if options.launcher is not None else ["-m", "sglang.launch_server"]
    return [options.python, *starter, *_as_arguments({**defaults, **further, **own})]


def environment(options: ServerOptions, *, receiver: str | None) -> dict[str, str]:
    """What the server needs beside the environment that it inherits."""
    needed = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    needed["SPT_NOENV"] = "1"  # SGLang's processes write no title over their environment, by which they are found
    if options.device == "cpu":
        needed["SGLANG_USE_CPU_ENGINE"] = "1"
    if receiver is not None:
        needed |= {RECEIVER: receiver, COMMIT_SECONDS: f"{options.commit_seconds:g}"}
        if options.run_dir is not None:
            needed[RUN_DIR] = options.run_dir
    return needed


def check(further: Mapping[str, Value], known: Collection[str]) -> None:
    """Raise UserError for an argument that asyncrl sets itself, and for one that this server does not have. known: its own list,
    names as on the command line without dashes in front."""
    for given in further:
        name = plain(given)
        if name in OWN:
            key = OWN[name]
            raise UserError(
                f"inference.arguments has {given}, which asyncrl sets itself: " + (f"set {key}" if key else "leave it out")
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"inference.arguments has {given}, which this SGLang server does not know: "
                + (f"did you mean {near[0]}?" if near else "`python -m sglang.launch_server --help` lists what it knows")
            )


def plain(name: str) -> str:
    """As on the command line: ``chunked_prefill_size`` and ``--chunked-prefill-size`` are ``chunked-prefill-size``."""
    return name.lstrip("-").replace("_", "-")


def _as_arguments(values: Mapping[str, Value]) -> list[str]:
    """True is a flag; False and None are left out."""
    arguments = []
    for name, value in values.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not False and value is not None:
            arguments += [f"--{name}", str(value)]
    return arguments
