"""What the front measures: where its time went, and what was scored.

The totals are the run's, however often its front was started again, and each group counts once: they are kept in `reward.jsonl`
when a group closes, with the ids of those whose end is not accepted yet. Of a lost front's groups these may come again, and are
known; what had not closed comes again and counts then. A set back takes nothing from the totals: what was scored, was.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl.clock import Clock
from asyncrl.messages import GroupId, ScoredGroup
from asyncrl.scheduling.groups import FailedGroup

REASONS_KEPT = 1000
COUNTS = ("trajectories", "failed_generation", "failed_scoring", "scored", "groups_scored", "groups_failed")
NOT_GENERATED = ("abort", "failed")  # finish reasons of a member that is not there


class ScoreMeter:
    """Idle is the time in which no sample waits for a worker or is at one: waiting for `rollouts`, or, while closed groups find
    no room, for the `scored` topic. It is counted from the first sample of each process on."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._busy = False
        self._blocked = False
        self._began: float | None = None
        self._since = clock.now()
        self.begin({})

    def begin(self, earlier: Mapping[str, Any]) -> None:
        """Go on from what an earlier front's `kept` said, or from nothing. Comes before everything else."""
        self._known = set(earlier.get("held", ()))  # counted by an earlier front, and not seen here
        self._earlier_seconds: float = earlier.get("seconds", 0.0)
        self._idle: dict[str, float] = defaultdict(float, earlier.get("idle_seconds", {}))
        self.counts = dict.fromkeys(COUNTS, 0) | earlier.get("counts", {})
        self._reasons: Counter[str] = Counter(earlier.get("reasons", {}))
        self._sums: dict[str, float] = defaultdict(float, earlier.get("sums", {}))
        self._numbers: Counter[str] = Counter(earlier.get("numbers", {}))

    def kept(self, held: Iterable[GroupId]) -> dict[str, Any]:
        """Everything that a later front goes on from, as plain values. held: groups that were counted and may come again."""
        return {
            "held": [*self._known, *map(str, held)],
            "seconds": self._seconds(),
            "idle_seconds": self._idle,
            "counts": self.counts,
            "reasons": self._reasons,
            "sums": self._sums,
            "numbers": self._numbers,
        }

    def busy(self, busy: bool) -> None:
        """Whether any sample is being scored or waits for it, from now on."""
        if busy and self._began is None:
            self._began = self._since = self._clock.now()
        self._change(busy, self._blocked)

    def blocked(self, blocked: bool) -> None:
        """Whether closed groups wait for room in the `scored` topic, from now on."""
        self._change(self._busy, blocked)

    def count(self, group: ScoredGroup | FailedGroup) -> None:
        """It has closed. Of one that failed, no scores count."""
        if self._known and (id := str(group.id)) in self._known:
            self._known.remove(id)
            return
        if isinstance(group, ScoredGroup):
            self.counts["groups_scored"] += 1
            self._count_members(group.failures, group.finish_reasons)
            if group.greedy is not None:
                self._count_greedy(group.greedy.reward)
            for name, values in {"reward": group.rewards, **group.components}.items():
                present = list(filter(math.isfinite, values.tolist()))  # a group is small: arrays would cost more
                self._sums[name] += sum(present)
                self._numbers[name] += len(present)
        else:
            self.counts["groups_failed"] += 1
            self._count_members(group.failures, [member.finish_reason for member in group.trajectories])

    def means(self) -> dict[str, float]:
        """The reward and its components, over the scored samples of scored groups."""
        return {name: self._sums[name] / number for name, number in self._numbers.items() if number}

    def reasons(self) -> dict[str, int]:
        """Why members failed, the most frequent ones."""
        return dict(self._reasons.most_common(50))

    def idle_share(self) -> float:
        seconds = self._seconds()
        return round(min(1.0, sum(self._idle.values()) / seconds), 4) if seconds > 0 else 0.0

    def idle_seconds(self) -> dict[str, float]:
        return {reason: round(seconds, 3) for reason, seconds in self._idle.items()}

    def _seconds(self) -> float:
        """Since the first sample, those of earlier fronts included; idle time is booked up to now."""
        self._change(self._busy, self._blocked)
        return self._earlier_seconds + (self._since - self._began if self._began is not None else 0.0)

    def _change(self, busy: bool, blocked: bool) -> None:
        now = self._clock.now()
        if not self._busy and self._began is not None:
            self._idle["scored" if self._blocked else "rollouts"] += now - self._since
        self._busy, self._blocked, self._since = busy, blocked, now

    def _count_members(self, failures: Sequence[str | None], finish_reasons: Iterable[str]) -> None:
        self.counts["trajectories"] += len(failures)
        self.counts["scored"] += failures.count(None)
        for failure, finish in zip(failures, finish_reasons, strict=True):
            if failure is not None:
                self.counts["failed_generation" if finish in NOT_GENERATED else "failed_scoring"] += 1
                self._count_reason(failure)

    def _count_greedy(self, reward: float) -> None:
        """The greedy response was scored, like the samples; its reward has a mean of its own."""
        self.counts["trajectories"] += 1
        self.counts["scored"] += 1
        self._sums["greedy_reward"] += reward
        self._numbers["greedy_reward"] += 1

    def _count_reason(self, reason: str) -> None:
        """Reasons may quote the sample; past REASONS_KEPT different ones, new ones are counted together."""
        self._reasons[reason if reason in self._reasons or len(self._reasons) < REASONS_KEPT else "other"] += 1
