"""Reward: one front (row `reward`), n workers (rows `reward/0` …).

    rollouts ─▶ RewardFront ─┬─ rpc score ─▶ RewardWorker ─▶ child process ─▶ the user's function
                 assemble ◀──┘◀──────────── scores
                    ├─ scored group ─▶ scored
                    └─ failed group ─▶ ledger

front      front     the service: receive, hand out, assemble, send
           dispatch  which samples go to which worker, and what becomes of those of a lost one (pure)
           judging   the teacher, where the run has one, beside the workers
           meter     where its time went, and what was scored (pure)
           outbox    what waits to be sent
worker     worker    the service around `asyncrl.rewards.executor`
"""

from asyncrl.services.reward.front import FrontParts, RewardFront
from asyncrl.services.reward.worker import RewardWorker

__all__ = ["FrontParts", "RewardFront", "RewardWorker"]
