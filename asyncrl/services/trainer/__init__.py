"""Trainer: takes scored groups, trains, publishes. Rank 0 leads, the others follow.

    [queue: scored] ─▶ Intake ─ pick ─▶ Leader ─ command ─▶ engine (all ranks) ─▶ Records ─▶ ledger ─▶ publisher ─▶ Saving
                                          │                    ▲
                                          └─ broadcast ─▶ Followers

loop      consumes                    waits for                                 is unblocked by
Leader    scored groups               a full batch; under `wait` its order      an arrival, a tick, the end of data, `stop`
          ledger                      the answer to each call                   the ledger, its deadline
          engine                      the step on every rank                    the ranks, training.step_timeout_seconds
          publisher                   a free staging slot                       ParameterSync, sync.timeout_seconds
          Saving                      the last checkpoint's files; no other's   the ranks, checkpoint.timeout_seconds
Follower  commands of rank 0          the next command (a tick at the latest)   rank 0, its death, training.step_timeout_seconds

Decisions are pure (`asyncrl.scheduling`); figures are pure (`figures`); files are written by `records`, whose docstring has the
format of batches.jsonl, metrics.jsonl and samples.jsonl; checkpoints are begun and committed by `saving`.
"""

from asyncrl.services.trainer.parts import TrainerParts
from asyncrl.services.trainer.service import TrainerService

__all__ = ["TrainerParts", "TrainerService"]
