"""The rows trainer/i."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.cluster.assembly.common import CLOCK, model_folder
from asyncrl.cluster.spec import RunSpec
from asyncrl.services.service import AddressBook, Service
from asyncrl.services.supervisor import Life, Row
from asyncrl.transport import security

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.messages import ScoredGroup
    from asyncrl.protocols import TrainingEngine
    from asyncrl.services.trainer.parts import TrainerParts

EVALUATIONS_SECONDS = 5.0  # of the supervisor's answer to the trainer, which keeps its best checkpoint by it


def trainer(spec: RunSpec, row: Row, life: Life) -> Service:
    from asyncrl.checkpoint import read_checkpoint
    from asyncrl.checkpoint.dcp import DcpFiles
    from asyncrl.engines.fsdp import FsdpLauncher
    from asyncrl.services.trainer import TrainerService

    config = spec.parsed_config()
    rank = row.index or 0

    async def connect(book: AddressBook, engine: TrainingEngine) -> TrainerParts:
        return _trainer_parts(spec, config, rank, life, book, engine)

    launcher = FsdpLauncher(
        config, model_path=model_folder(config.model.path), rank=rank, host=_meeting_host(config), files=DcpFiles()
    )
    return TrainerService(
        config,
        Path(spec.run_dir),
        rank,
        launcher=launcher,
        connect=connect,
        clock=CLOCK,
        incarnation=life.incarnation,
        resume=read_checkpoint(Path(life.checkpoint)) if life.checkpoint is not None else None,
        launched=life.launched,
        earlier_seconds=life.earlier_s,
    )


def _trainer_parts(spec: RunSpec, config: Config, rank: int, life: Life, book: AddressBook, engine: Any) -> TrainerParts:
    from asyncrl.services.ledger_client import RpcLedgerClient
    from asyncrl.services.trainer.parts import LeaderParts, TrainerParts
    from asyncrl.tracking.remote import RemoteTracker
    from asyncrl.transport.client import QueueReceiver
    from asyncrl.transport.rpc import RpcClient
    from asyncrl.weight_sync.plan import bucket_bytes
    from asyncrl.weight_sync.publisher import ShmPublisher

    publisher = ShmPublisher(
        engine.named_parameters(),
        run_id=spec.run_id,
        address=book["parameter_sync"]["rpc"],
        incarnation=life.incarnation,
        bucket_bytes=bucket_bytes(config.sync.bucket_megabytes, config.sync.max_megabytes_per_second),
        timeout_seconds=config.sync.timeout_seconds,
        rank=rank,
        world_size=config.training.ranks,
        wire_dtype=config.model.dtype,
    )
    if rank:
        return TrainerParts(publisher=publisher)
    queue, supervisor = RpcClient(book["message_queue"]["rpc"]), RpcClient(book["supervisor"]["rpc"])
    away = config.queue.reconnect_seconds

    async def evaluations(name: str) -> dict[int, float]:
        return dict(await supervisor.call("evaluations", timeout=EVALUATIONS_SECONDS, name=name))

    leader = LeaderParts(
        receiver=QueueReceiver(book["message_queue"]["broker"], "scored", consumer="trainer", silence_seconds=away),
        ledger=RpcLedgerClient(queue, deadline=away),
        tracker=RemoteTracker(book["supervisor"]["rpc"]),
        evaluations=evaluations,
        probes=_probes(config, book) if config.inference.engine == "sglang" else None,
    )
    return TrainerParts(publisher=publisher, leader=leader, closers=(queue.close, supervisor.close))


def _probes(config: Config, book: AddressBook) -> Callable[[], Awaitable[Mapping[str, Sequence[ScoredGroup]]]]:
    """What each server answers to fixed prompts."""
    from asyncrl.engines.probes import probe, vocabulary_of

    vocabulary = vocabulary_of(model_folder(config.model.path), trust_remote_code=config.model.trust_remote_code)
    urls = {name: addresses["http"] for name, addresses in book.items() if name.startswith("inference/")}

    async def probes() -> dict[str, list[ScoredGroup]]:
        return {
            name: await probe(
                name,
                url,
                token=security.door().token,
                is_embedded=config.inference.engine == "embedded",
                temperature=config.rollout.temperature,
                vocabulary=vocabulary,
                context_tokens=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
            )
            for name, url in urls.items()
        }

    return probes


def _meeting_host(config: Config) -> str:
    """Where the trainer's ranks meet, on loopback unless they may be on several hosts: torch.distributed asks for no key."""
    from asyncrl.transport.hosts import LOOPBACK

    return LOOPBACK if config.cluster.ray_address is None else security.door().reached_at
