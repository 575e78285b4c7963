"""Processes of a small run, to be killed: `python -m tests.services.message_queue.parts ROLE …`. None of them loads a model.

rollouter ═members═▶ [rollouts] ═▶ front ═scored groups═▶ [scored] ═▶ (the test, as trainer)
    └───────────── ledger, in the queue's process ──────────────────────────┘
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from asyncrl.clock import SystemClock
from asyncrl.errors import StreamClosed
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, PromptCursor
from asyncrl.services.ledger_client import RpcLedgerClient
from asyncrl.services.message_queue import Fresh, MessageQueueService, Restarted, SetBack
from asyncrl.transport.client import QueueReceiver, QueueSender
from asyncrl.transport.rpc import RpcClient
from tests.messages.samples import scored_group, trajectory
from tests.services.message_queue.world import GROUP_SIZE, config_of

ROWS = 250
PACE_SECONDS = 0.02
BEAT_SECONDS = 0.2


def ledger_at(address: str) -> tuple[RpcLedgerClient, RpcClient]:
    client = RpcClient(address)
    return RpcLedgerClient(client, deadline=60, try_seconds=0.5), client


async def queue(run_dir: str, durability: str, how: str, earlier: str) -> None:
    kind, *rest = json.loads(how)
    recovery = {
        "fresh": lambda: Fresh(),
        "restarted": lambda *held: Restarted(frozenset(map(GroupId.parse, held))),
        "set_back": lambda step, incarnation: SetBack(step, incarnation),
    }[kind](*rest)
    config = config_of(durability, checkpoint_every=1, capacity=16)
    service = MessageQueueService(config, Path(run_dir), clock=SystemClock(), recovery=recovery)
    print(json.dumps(await service.start(json.loads(earlier))), flush=True)
    await service.run({})


async def rollouter(addresses: str) -> None:
    """Goes on where the ledger says: first what was returned, then new rows; ends the stream when all are handed over."""
    book = json.loads(addresses)
    ledger, client = ledger_at(book["rpc"])
    sender = QueueSender(book["broker"], "rollouts", producer="rollouter", heartbeat_seconds=BEAT_SECONDS)
    resumption = await ledger.resume_rollouter()
    await ledger.restart([Dispatch(group.id, 0) for group in resumption.returned])
    for group in resumption.returned:
        await sender.send([trajectory(group.id.row, member, group_size=GROUP_SIZE) for member in group.missing])
    position = resumption.cursor.position if resumption.cursor else 0
    for row in range(position, ROWS):
        await ledger.dispatch([Dispatch(GroupId(0, row, 0), 0)], PromptCursor(0, row + 1, ROWS, 0, False))
        for member in range(GROUP_SIZE):
            await sender.send([trajectory(row, member, group_size=GROUP_SIZE)])
        await asyncio.sleep(PACE_SECONDS)
    await sender.close()
    await client.close()


async def front(addresses: str) -> None:
    """Members to groups; its memory is the queue's."""
    book = json.loads(addresses)
    receiver = QueueReceiver(book["broker"], "rollouts", consumer="reward", heartbeat_seconds=BEAT_SECONDS)
    sender = QueueSender(book["broker"], "scored", producer="reward", heartbeat_seconds=BEAT_SECONDS)
    members: dict[GroupId, set[int]] = {}
    try:
        while True:
            for delivery in await receiver.receive(max_items=8, timeout=5):
                id = delivery.message.id
                before = len(members.setdefault(id.group, set()))
                members[id.group].add(id.member)
                if before < len(members[id.group]) == GROUP_SIZE:
                    await sender.send([scored_group(id.row)])
    except StreamClosed:
        await sender.close()
    await receiver.close()


if __name__ == "__main__":
    asyncio.run({"queue": queue, "rollouter": rollouter, "front": front}[sys.argv[1]](*sys.argv[2:]))
