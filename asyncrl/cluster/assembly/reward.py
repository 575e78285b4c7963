"""The rows reward and reward/i."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import logs
from asyncrl.cluster.assembly.common import CLOCK, away_seconds
from asyncrl.cluster.assembly.servers import where_the_teacher_is
from asyncrl.cluster.spec import RunSpec
from asyncrl.services.service import AddressBook, Service
from asyncrl.services.supervisor import Life, Row

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.protocols import Teacher
    from asyncrl.services.reward import FrontParts

MARGIN_SECONDS = 60.0  # of a batch of samples, beyond its calls and the start of a process that makes them


def reward_front(spec: RunSpec, row: Row, life: Life) -> Service:
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
        away_seconds=away_seconds(config),
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
    teacher = where_the_teacher_is(config, book)
    if teacher is None:
        return None
    from asyncrl.engines.teacher import HttpTeacher

    _, url, token = teacher
    seconds, temperature = config.algorithm.teacher.timeout_seconds, config.rollout.temperature
    return HttpTeacher(url, token=token, temperature=temperature, timeout_seconds=seconds)


def reward_worker(spec: RunSpec, index: int) -> Service:
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
    return RewardWorker(index, executor, concurrency=reward.concurrency, clock=CLOCK, silence_seconds=away_seconds(config))
