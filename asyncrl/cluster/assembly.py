"""The wiring: which real parts each row of a run is made of.

    row              service               its parts
    message_queue    MessageQueueService   broker and ledger of its own
    parameter_sync   ParameterSyncService  a line to each server: ZeroMQ to its receiver, or HTTP (sync.mode broadcast, disk)
    inference/i      InferenceServer       the embedded engine, a weight receiver around it
                     SglangServer          or an SGLang server as its child, or one that is attached to
    trainer/i        TrainerService        FSDP2 engine, shared-memory publisher; rank 0 also receiver, ledger, tracker
    teacher/0        InferenceServer       the embedded engine alone, on algorithm.teacher.path
    rollouter        Rollouter             prompt source, fleet client, agent, sender, ledger, tracker
    reward           RewardFront           receiver, sender, ledger, tracker, a line to the teacher
    reward/i         RewardWorker          an executor of the run's reward functions

Imports stand inside the builders, so that a process loads what its own row needs and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import logs
from asyncrl.clock import SystemClock
from asyncrl.cluster.spec import RunSpec
from asyncrl.services.service import AddressBook, Service
from asyncrl.services.supervisor import Life, Row
from asyncrl.transport import security

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.messages import ScoredGroup
    from asyncrl.protocols import Teacher, TrainingEngine
    from asyncrl.services.message_queue.recovery import Recovery
    from asyncrl.services.parameter_sync.service import Channel
    from asyncrl.services.reward import FrontParts
    from asyncrl.services.rollouter.parts import RollouterParts
    from asyncrl.services.trainer.parts import TrainerParts

CLOCK = SystemClock()
EVALUATIONS_SECONDS = 5.0  # of the supervisor's answer to the trainer, which keeps its best checkpoint by it
MARGIN_SECONDS = 60.0  # of a batch of samples, beyond its calls and the start of a process that makes them
BUILTIN_SEED = 0  # built-in models are the same for every run, whatever the run's seed


def assemble(spec: RunSpec, row: Row, life: Life) -> Service:
    """The service of `row`, not started."""
    if row.role == "reward" and row.index is not None:
        return _reward_worker(spec, row.index)
    return _BUILDERS[row.role](spec, row, life)


def load(spec: RunSpec, row: Row) -> None:
    """Import what takes seconds of the parts of `row`, which may happen while its model is still being made."""
    if row.role == "trainer":
        import asyncrl.engines.fsdp
    elif row.role == "teacher" or (row.role == "inference" and spec.config["inference"]["engine"] == "embedded"):
        import asyncrl.engines.embedded  # noqa: F401


def model_folder(model: str) -> Path | str:
    """Where the model of this `model.path` lies; a built-in one is made first, if it is not there yet."""
    from asyncrl.data.builtin import BUILTIN_PREFIX, arithmetic

    if not model.startswith(BUILTIN_PREFIX):
        return model
    from asyncrl.engines.builtin import prepare

    return prepare(model, arithmetic.examples(), seed=BUILTIN_SEED)


def _message_queue(spec: RunSpec, row: Row, life: Life) -> Service:
    from asyncrl.services.message_queue import MessageQueueService

    return MessageQueueService(spec.parsed_config(), Path(spec.run_dir), clock=CLOCK, recovery=_recovery(life))


def _recovery(life: Life) -> Recovery:
    from asyncrl.messages import GroupId
    from asyncrl.services.message_queue.recovery import Fresh, Restarted, SetBack

    if life.set_back_to is not None:
        return SetBack(life.set_back_to, life.incarnation)
    if life.first:
        return Fresh(life.incarnation)
    return Restarted(frozenset(map(GroupId.parse, life.held or ())))


def _parameter_sync(spec: RunSpec, row: Row, life: Life) -> Service:
    from asyncrl.services.parameter_sync.service import ParameterSyncService, SyncSettings
    from asyncrl.weight_sync.plan import bucket_bytes

    config = spec.parsed_config()
    sync = config.sync
    throttle = sync.max_megabytes_per_second
    settings = SyncSettings(
        transport=sync.transport,
        kv_policy=sync.kv_policy,
        verify=sync.verify,
        verify_every=sync.verify_every,
        bucket_bytes=bucket_bytes(sync.bucket_megabytes, throttle),
        bytes_per_second=throttle * 1e6 if throttle is not None else None,
        timeout_seconds=sync.timeout_seconds,
        silence_seconds=sync.silence_seconds,
    )
    return ParameterSyncService(settings, connect=_line(spec, config), clock=CLOCK, record=Path(spec.run_dir) / "sync.jsonl")


def _line(spec: RunSpec, config: Config) -> Callable[[str, str, str], Channel]:
    """What carries versions to a server, by sync.mode."""
    from asyncrl.weight_sync.channel import ReceiverChannel, staged_line

    if config.sync.mode == "staged":
        return staged_line
    from asyncrl.weight_sync.endpoints import UpdateEndpoints
    from asyncrl.weight_sync.http_channel import Carrier, DiskCarrier, HttpChannel

    def line(name: str, http: str, weights: str) -> HttpChannel:
        endpoints = UpdateEndpoints(http, token=security.door().token, timeout_seconds=config.sync.timeout_seconds)
        carrier: Carrier
        if config.sync.mode == "disk":
            folder = Path(config.sync.folder or spec.run_dir) / "versions" / name.replace("/", "-")
            carrier = DiskCarrier(endpoints, folder, Path(model_folder(config.model.path)))
        else:
            from asyncrl.weight_sync.broadcast import BroadcastCarrier

            carrier = BroadcastCarrier(
                endpoints,
                tensor_parallel=config.inference.tensor_parallel,
                timeout_seconds=config.sync.timeout_seconds,
            )
        return HttpChannel(endpoints, carrier, ReceiverChannel(weights) if weights else None)

    return line


def _inference(spec: RunSpec, row: Row, life: Life) -> Service:
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


def _teacher(spec: RunSpec, row: Row, life: Life) -> Service:
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


def _where_the_teacher_is(config: Config, book: AddressBook) -> tuple[str, str, str | None] | None:
    """(its name, URL, and the token that it wants), None where the run needs none."""
    if not config.algorithm.advantage.needs.teacher:
        return None
    if config.algorithm.serves_teacher:
        return "teacher/0", book["teacher/0"]["http"], security.door().token
    url = config.algorithm.teacher.url
    assert url is not None, "a teacher has a path or a url"
    return f"the teacher at {url}", url.rstrip("/"), None


def _meeting_host(config: Config) -> str:
    """Where the trainer's ranks meet, on loopback unless they may be on several hosts: torch.distributed asks for no key."""
    from asyncrl.transport.hosts import LOOPBACK

    return LOOPBACK if config.cluster.ray_address is None else security.door().reached_at


def _server_device() -> str:
    """Ray shows a process only the GPU that it was given."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _trainer(spec: RunSpec, row: Row, life: Life) -> Service:
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


def _rollouter(spec: RunSpec, row: Row, life: Life) -> Service:
    from asyncrl.services.rollouter import Rollouter

    config = spec.parsed_config()

    async def connect(book: AddressBook) -> RollouterParts:
        parts = _rollouter_parts(spec, config, book)
        await _compare_tokenizers(config, book, parts)
        return parts

    return Rollouter(config, connect, clock=CLOCK)


async def _compare_tokenizers(config: Config, book: AddressBook, parts: RollouterParts) -> None:
    """Raises RunError where an SGLang server's, or the teacher's, is another."""
    from asyncrl.engines.probes import check_tokenizer

    for name, addresses in book.items():
        if name.startswith("inference/") and config.inference.engine == "sglang":
            await check_tokenizer(name, addresses["http"], token=security.door().token, tokenizer=parts.tokenizer)
    if teacher := _where_the_teacher_is(config, book):
        name, url, token = teacher
        await check_tokenizer(name, url, token=token, tokenizer=parts.tokenizer)


def _rollouter_parts(spec: RunSpec, config: Config, book: AddressBook) -> RollouterParts:
    from asyncrl.agents import load_agent
    from asyncrl.data import open_eval_prompts, open_prompts
    from asyncrl.engines.client import FleetClient
    from asyncrl.engines.tokenizer import HfTokenizer
    from asyncrl.services.kept_figures import KeptFigures
    from asyncrl.services.ledger_client import RpcLedgerClient
    from asyncrl.services.rollouter import RollouterParts, RpcScorer
    from asyncrl.tracking.remote import RemoteTracker
    from asyncrl.transport.client import QueueSender
    from asyncrl.transport.rpc import RpcClient
    from asyncrl.weight_sync.fleet_client import RpcFleet

    data, objects = config.data, spec.objects
    train = objects.train if objects.train is not None else data.train
    held_out = objects.eval if objects.eval is not None else data.eval
    folder = model_folder(config.model.path)
    tokenizer = HfTokenizer(config.model.tokenizer or folder, model_path=folder, trust_remote_code=config.model.trust_remote_code)
    is_embedded = config.inference.engine == "embedded"
    engine = FleetClient(
        is_embedded=is_embedded, token=security.door().token, max_batch=None if is_embedded else config.inference.max_batch
    )
    queue, reward = RpcClient(book["message_queue"]["rpc"]), RpcClient(book["reward"]["rpc"])
    fleet = RpcFleet(book["parameter_sync"]["rpc"])
    away = config.queue.reconnect_seconds
    return RollouterParts(
        open_source=lambda cursor: open_prompts(train, seed=config.seed, shuffle=data.shuffle, epochs=data.epochs, cursor=cursor),
        eval_prompts=[] if held_out is None else open_eval_prompts(held_out, samples=config.eval.samples),
        tokenizer=tokenizer,
        engine=engine,
        agent=load_agent(objects.agent or config.rollout.agent, engine, tokenizer),
        sender=QueueSender(book["message_queue"]["broker"], "rollouts", producer="rollouter", silence_seconds=away),
        ledger=RpcLedgerClient(queue, deadline=away),
        fleet=fleet,
        scorer=RpcScorer(reward, away_seconds=_away_seconds(config)),
        tracker=RemoteTracker(book["supervisor"]["rpc"]),
        on_fleet=engine.update,
        run_dir=Path(spec.run_dir),
        kept=KeptFigures(Path(spec.run_dir) / "rollouter.jsonl"),
        closers=(queue.close, reward.close, fleet.close),
    )


def _reward_front(spec: RunSpec, row: Row, life: Life) -> Service:
    from asyncrl.services.reward import RewardFront

    config = spec.parsed_config()
    return RewardFront(
        lambda book: _front_parts(spec, book),
        min_scored=config.reward.min_scored,
        with_greedy=config.algorithm.advantage.needs.greedy,
        limit_seconds=config.reward.timeout_seconds,
        num_functions=len(config.reward.functions),
        max_worker_deaths=config.reward.max_worker_deaths,
        max_failed_groups=config.reward.max_failed_groups,
        silence_seconds=config.queue.lease_seconds,
        away_seconds=_away_seconds(config),
        margin_seconds=config.cluster.start_timeout_seconds + MARGIN_SECONDS,
        clock=CLOCK,
    )


def _front_parts(spec: RunSpec, book: AddressBook) -> FrontParts:
    from asyncrl.services.kept_figures import KeptFigures
    from asyncrl.services.ledger_client import RpcLedgerClient
    from asyncrl.services.reward import FrontParts
    from asyncrl.tracking.remote import RemoteTracker
    from asyncrl.tracking.samples import FailedSamples
    from asyncrl.transport.client import QueueReceiver, QueueSender
    from asyncrl.transport.rpc import RpcClient

    config = spec.parsed_config()
    queue, away = RpcClient(book["message_queue"]["rpc"]), config.queue.reconnect_seconds
    return FrontParts(
        receiver=QueueReceiver(book["message_queue"]["broker"], "rollouts", consumer="reward", silence_seconds=away),
        sender=QueueSender(book["message_queue"]["broker"], "scored", producer="reward", silence_seconds=away),
        ledger=RpcLedgerClient(queue, deadline=away),
        tracker=RemoteTracker(book["supervisor"]["rpc"]),
        keep_failed=FailedSamples(Path(spec.run_dir)),
        kept=KeptFigures(Path(spec.run_dir) / "reward.jsonl"),
        teacher=_line_to_the_teacher(config, book),
        closers=(queue.close,),
    )


def _line_to_the_teacher(config: Config, book: AddressBook) -> Teacher | None:
    teacher = _where_the_teacher_is(config, book)
    if teacher is None:
        return None
    from asyncrl.engines.teacher import HttpTeacher

    _, url, token = teacher
    seconds, temperature = config.algorithm.teacher.timeout_seconds, config.rollout.temperature
    return HttpTeacher(url, token=token, temperature=temperature, timeout_seconds=seconds)


def _reward_worker(spec: RunSpec, index: int) -> Service:
    from asyncrl.rewards.executor import FunctionExecutor
    from asyncrl.rewards.function import FunctionSpec
    from asyncrl.services.reward import RewardWorker

    config = spec.parsed_config()
    reward = config.reward
    functions: list[tuple[str, str | Callable[..., Any]]] = [
        (entry.function, spec.objects.rewards.get(position, entry.function)) for position, entry in enumerate(reward.functions)
    ]
    executor = FunctionExecutor(
        [FunctionSpec.of(name, function) for name, function in functions],
        [entry.weight for entry in reward.functions],
        limit_seconds=reward.timeout_seconds,
        concurrency=reward.concurrency,
        output=logs.log_path(Path(spec.run_dir), f"reward/{index}"),
        load_seconds=config.cluster.start_timeout_seconds,
    )
    return RewardWorker(index, executor, concurrency=reward.concurrency, clock=CLOCK, silence_seconds=_away_seconds(config))


def _away_seconds(config: Config) -> float:
    """How long a row may be away that is started again: its start, and what comes before it."""
    return 2 * config.cluster.start_timeout_seconds


_BUILDERS: dict[str, Callable[[RunSpec, Row, Life], Service]] = {
    "message_queue": _message_queue,
    "parameter_sync": _parameter_sync,
    "inference": _inference,
    "teacher": _teacher,
    "trainer": _trainer,
    "rollouter": _rollouter,
    "reward": _reward_front,
}
