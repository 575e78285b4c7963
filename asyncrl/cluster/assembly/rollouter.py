"""The row rollouter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cluster.assembly.common import CLOCK, away_seconds, model_folder
from asyncrl.cluster.assembly.servers import where_the_teacher_is
from asyncrl.cluster.spec import RunSpec
from asyncrl.services.service import AddressBook, Service
from asyncrl.services.supervisor import Life, Row
from asyncrl.transport import security

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.services.rollouter.parts import RollouterParts


def rollouter(spec: RunSpec, row: Row, life: Life) -> Service:
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
    if teacher := where_the_teacher_is(config, book):
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
        scorer=RpcScorer(reward, away_seconds=away_seconds(config)),
        tracker=RemoteTracker(book["supervisor"]["rpc"]),
        on_fleet=engine.update,
        run_dir=Path(spec.run_dir),
        kept=KeptFigures(Path(spec.run_dir) / "rollouter.jsonl"),
        closers=(queue.close, reward.close, fleet.close),
    )
