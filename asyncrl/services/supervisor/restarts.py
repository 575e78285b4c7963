"""What is started again when processes are lost, and when it is not tried any more. Pure.

    lost                               started again                                         besides
    reward/i, reward, inference/i,     that row
    teacher/0
    rollouter                          that row, which asks the ledger where it stands
    parameter_sync                     that row                                              trainer ranks announce themselves
    message_queue (process, power)     that row, from ledger and journal
    message_queue (none)               it, rollouter, reward                                 what the trainer holds stays queued
    trainer/i                          all ranks, message_queue, rollouter, reward           the ledger goes back to a checkpoint

A row that was lost `max_restarts` times while the run made no step that it had not made before is not started again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.services.supervisor.runtime import Row

RESTARTS = 5
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 15.0


@dataclass(frozen=True)
class RestartPlan:
    """rows: ended where they still live, then started in this order. sets_back: the trainer goes on from the newest checkpoint.
    asks_held: the trainer is asked first which scored groups it holds. reannounces: trainer ranks register their plans again."""

    rows: tuple[Row, ...]
    sets_back: bool = False
    asks_held: bool = False
    reannounces: bool = False
    delay_seconds: float = 0.0

    def waves(self) -> list[tuple[Row, ...]]:
        """Rows that start together: the queue, by which the others go on, before all others."""
        first = tuple(row for row in self.rows if row.role == "message_queue")
        rest = tuple(row for row in self.rows if row.role != "message_queue")
        return [wave for wave in (first, rest) if wave]


@dataclass(frozen=True)
class GiveUp:
    """The row is not started again, and why, with the fix."""

    row: Row
    reason: str


class RestartPolicy:
    """Counts losses, and plans what follows each."""

    def __init__(self, config: Config, rows: Sequence[Row]):
        self._config, self._rows = config, tuple(rows)
        self._losses: dict[str, int] = {}
        self._best_step = self._step_at_loss = 0

    def step_finished(self, step: int) -> None:
        """The run has finished this step. Only one that it had not finished before is progress."""
        self._best_step = max(self._best_step, step)

    def after_loss(self, lost: Collection[Row], unfinished: RestartPlan | None = None) -> RestartPlan | GiveUp:
        """What to do now that these rows' processes are gone. unfinished: a plan that was being carried out, and is part of the
        new one."""
        if self._best_step > self._step_at_loss:
            self._losses.clear()
            self._step_at_loss = self._best_step
        for row in lost:
            self._losses[row.name] = self._losses.get(row.name, 0) + 1
        for row in lost:
            if reason := self._why_not(row):
                return GiveUp(row, reason)
        times = max(self._losses[row.name] for row in lost)
        return self._plan(lost, _delay(times), unfinished)

    def _why_not(self, row: Row) -> str | None:
        limit, times = self._limit(row), self._losses[row.name]
        if limit == 0:
            return (
                "it is not started again, because cluster.max_restarts is 0"
                if self._config.cluster.max_restarts is not None
                else "it is not started again, because this run keeps nothing to go on from: set checkpoint.every"
            )
        if row.role == "trainer" and not self._config.checkpoint.every:
            return "there is no checkpoint to go on from: set checkpoint.every, so that a lost trainer is started again"
        if times > limit:
            return (
                f"it was lost {times} times without a new step in between (cluster.max_restarts is {limit}): its log says what "
                "kills it; free memory, or raise the limit"
            )
        return None

    def _limit(self, row: Row) -> int:
        """An SGLang server and a teacher keep nothing of the run: where nothing else is said they may always be started again."""
        is_server = row.role == "teacher" or (row.role == "inference" and self._config.inference.engine == "sglang")
        return RESTARTS if is_server and self._config.cluster.max_restarts is None else max_restarts(self._config)

    def _plan(self, lost: Collection[Row], delay: float, unfinished: RestartPlan | None) -> RestartPlan:
        again = {*lost, *(unfinished.rows if unfinished is not None else ())}
        roles = {row.role for row in again if row.index is None or row.role != "reward"}
        sets_back = "trainer" in roles
        asks_held = "message_queue" in roles and self._config.queue.durability == "none" and not sets_back
        if sets_back:
            again |= self._of("trainer", "message_queue", "rollouter") | {Row("reward")}
        if asks_held:
            again |= self._of("rollouter") | {Row("reward")}
        return RestartPlan(
            rows=tuple(sorted(again, key=lambda row: (row.role != "message_queue", self._rows.index(row)))),
            sets_back=sets_back,
            asks_held=asks_held,
            reannounces="parameter_sync" in roles and not sets_back,
            delay_seconds=delay,
        )

    def _of(self, *roles: str) -> set[Row]:
        return {row for row in self._rows if row.role in roles}


def max_restarts(config: Config) -> int:
    """cluster.max_restarts, null resolved."""
    if config.cluster.max_restarts is not None:
        return config.cluster.max_restarts
    keeps = config.checkpoint.every > 0 or config.queue.durability != "none"
    return RESTARTS if keeps else 0


def _delay(times: int) -> float:
    """None before the first restart in a row, then doubling."""
    return 0.0 if times == 1 else min(FIRST_DELAY_SECONDS * 2 ** (times - 2), LONGEST_DELAY_SECONDS)
