"""The rows that serve models: inference/i and teacher/0."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import logs
from asyncrl.cluster.assembly.common import CLOCK, model_folder
from asyncrl.cluster.spec import RunSpec
from asyncrl.services.service import AddressBook, Service
from asyncrl.services.supervisor import Life, Row
from asyncrl.transport import security

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


def inference(spec: RunSpec, row: Row, life: Life) -> Service:
    config = spec.parsed_config()
    return _sglang(spec, row, config) if config.inference.engine == "sglang" else _embedded(row, config)


def _sglang(spec: RunSpec, row: Row, config: Config) -> Service:
    from asyncrl.engines.sglang.arguments import ServerOptions
    from asyncrl.engines.sglang.process import AttachedServers, OwnServers
    from asyncrl.services.sglang_server import Servers, SglangServer
    from asyncrl.tracking.remote import RemoteTracker

    inference, run_dir = config.inference, Path(spec.run_dir)
    servers: Servers
    if inference.attach:
        attached = inference.attach[row.index or 0]
        servers = AttachedServers(attached.url, attached.receiver, silence_seconds=config.sync.silence_seconds)
    else:
        options = ServerOptions(
            python=inference.python or sys.executable,
            launcher=inference.launcher,
            model_path=str(model_folder(config.model.path)),
            dtype=config.model.dtype,
            context_tokens=_room(config),
            max_batch=inference.max_batch,
            device=_server_device(),
            tokenizer=config.model.tokenizer,
            trust_remote_code=config.model.trust_remote_code,
            tensor_parallel=inference.tensor_parallel,
            memory_fraction=inference.memory_fraction,
            further=inference.arguments,
            run_dir=spec.run_dir,
            commit_seconds=config.sync.timeout_seconds,
        )
        servers = OwnServers(options, logs.log_path(run_dir, f"{row.name}/sglang"))
    return SglangServer(
        row.name,
        servers,
        lambda book: RemoteTracker(book["supervisor"]["rpc"]),
        start_seconds=config.cluster.start_timeout_seconds,
        clock=CLOCK,
    )


def _room(config: Config) -> int:
    """Tokens of a prompt and its response that a server has room for."""
    from asyncrl.config.checks import longest_sequence

    return config.inference.context_tokens or longest_sequence(config)


def _embedded(row: Row, config: Config) -> Service:
    from asyncrl.engines.embedded import EngineOptions
    from asyncrl.services.inference import InferenceServer
    from asyncrl.weight_sync.receiver import WeightReceiver

    wanted = config.inference.batch_invariant
    options = EngineOptions(
        dtype=config.model.dtype,
        device=_server_device(),
        context_tokens=_room(config),
        max_batch=config.inference.max_batch,
        tokenizer=config.model.tokenizer,
        trust_remote_code=config.model.trust_remote_code,
        batch_invariant="auto" if wanted == "auto" and config.rollout.max_staleness == 0 else wanted == "always",
        commit_seconds=config.sync.timeout_seconds,
    )
    return InferenceServer(row.name, model_folder(config.model.path), options, make_receiver=WeightReceiver)


def teacher(spec: RunSpec, row: Row, life: Life) -> Service:
    """No weight receiver: it stays as it was loaded."""
    from asyncrl.engines.embedded import EngineOptions
    from asyncrl.services.inference import InferenceServer

    config = spec.parsed_config()
    path = config.algorithm.teacher.path
    assert path is not None, "there is a row for a path alone"
    options = EngineOptions(
        dtype=config.model.dtype,
        device=_server_device(),
        context_tokens=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        max_batch=1,
        trust_remote_code=config.model.trust_remote_code,
    )
    return InferenceServer(row.name, model_folder(path), options, make_receiver=None)


def where_the_teacher_is(config: Config, book: AddressBook) -> tuple[str, str, str | None] | None:
    """(its name, URL, and the token that it wants), None where the run needs none."""
    if not config.algorithm.advantage.needs.teacher:
        return None
    if config.algorithm.serves_teacher:
        return "teacher/0", book["teacher/0"]["http"], security.door().token
    url = config.algorithm.teacher.url
    assert url is not None, "a teacher has a path or a url"
    return f"the teacher at {url}", url.rstrip("/"), None


def _server_device() -> str:
    """Ray shows a process only the GPU that it was given."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
