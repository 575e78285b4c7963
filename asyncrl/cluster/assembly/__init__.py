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

    queue.py     servers.py     trainer.py     rollouter.py     reward.py     common.py

Imports stand inside the builders, so that a process loads what its own row needs and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.cluster.assembly import queue, reward, rollouter, servers, trainer
from asyncrl.cluster.assembly.common import model_folder
from asyncrl.cluster.spec import RunSpec
from asyncrl.services.service import Service
from asyncrl.services.supervisor import Life, Row

BUILDERS: dict[str, Callable[[RunSpec, Row, Life], Service]] = {
    "message_queue": queue.message_queue,
    "parameter_sync": queue.parameter_sync,
    "inference": servers.inference,
    "teacher": servers.teacher,
    "trainer": trainer.trainer,
    "rollouter": rollouter.rollouter,
    "reward": reward.reward_front,
}


def assemble(spec: RunSpec, row: Row, life: Life) -> Service:
    """The service of `row`, not started."""
    if row.role == "reward" and row.index is not None:
        return reward.reward_worker(spec, row.index)
    return BUILDERS[row.role](spec, row, life)


def load(spec: RunSpec, row: Row) -> None:
    """Import what takes seconds of the parts of `row`, which may happen while its model is still being made."""
    if row.role == "trainer":
        import asyncrl.engines.fsdp
    elif row.role == "teacher" or (row.role == "inference" and spec.config["inference"]["engine"] == "embedded"):
        import asyncrl.engines.embedded  # noqa: F401


__all__ = ["assemble", "load", "model_folder"]
