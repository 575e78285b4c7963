"""What the rollouter counts, and how it becomes metrics.

The totals are the run's, however often its rollouter was started again: they are kept in `rollouter.jsonl` before what they count
leaves the process, so that nobody ever holds a response that was not counted. A set back takes nothing from them. Greedy
responses are among what was generated, and counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.clock import Clock, IdleMeter
from asyncrl.messages import Trajectory

TOTALS = ("generated", "failed", "tokens", "truncated", "most_versions", "greedy")


class Figures:
    """Totals of the run, and the difference since the last report.

    Idle is the time during which no response is being generated, under the reason why admission then waited; the time between two
    processes is nobody's.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self.waits = IdleMeter(clock)  # admission's waits, whether or not something is being generated meanwhile
        self.blocked = IdleMeter(clock)  # the outbox's, for room in the queue
        self.active = 0
        self._why_idle = "start"
        self.begin({})

    def begin(self, earlier: Mapping[str, Any]) -> None:
        """Time counts from now on; totals go on from what an earlier process's `kept` said, or from nothing."""
        now = self._clock.now()
        self.generated, self.failed, self.tokens, self.truncated, self.most_versions, self.greedy = (
            earlier.get(name, 0) for name in TOTALS
        )
        self.finish_reasons: Counter[str] = Counter(earlier.get("finish_reasons", {}))
        self.waits.seconds = dict(earlier.get("wait_seconds", {}))
        self.blocked.seconds = dict(earlier.get("blocked_seconds", {}))
        self._idle: dict[str, float] = dict(earlier.get("idle_seconds", {}))
        self._began = now - earlier.get("seconds", 0.0)
        self._idle_since: float | None = now
        self._reported = (now, self.tokens, self.generated, self.truncated, self.failed)

    def kept(self) -> dict[str, Any]:
        """Everything that a later process goes on from, as plain values."""
        self._settle_idle()
        return {
            **{name: getattr(self, name) for name in TOTALS},
            "finish_reasons": self.finish_reasons,
            "wait_seconds": self.waits.seconds,
            "blocked_seconds": self.blocked.seconds,
            "idle_seconds": self._idle,
            "seconds": self._clock.now() - self._began,
        }

    def take(self, trajectory: Trajectory) -> None:
        if trajectory.failure is not None:
            self.failed += 1
        else:
            self.generated += 1
            self.tokens += len(trajectory.response_tokens)
            self.truncated += trajectory.finish_reason == "length"
            self.greedy += trajectory.is_greedy
            if len(versions := trajectory.versions):
                self.most_versions = max(self.most_versions, versions.item(-1) - versions.item(0) + 1)
        self.finish_reasons[trajectory.finish_reason] += 1

    def set_active(self, active: int) -> None:
        """Responses being generated from now on."""
        if active and self._idle_since is not None:
            self._settle_idle()
            self._idle_since = None
        elif not active and self._idle_since is None:
            self._idle_since = self._clock.now()
        self.active = active

    def idle_because(self, reason: str) -> None:
        """The reason of idle time from now on."""
        if reason != self._why_idle:
            self._settle_idle()
            self._why_idle = reason

    def _settle_idle(self) -> None:
        """Book the idle time so far under the reason so far."""
        if self._idle_since is not None:
            now = self._clock.now()
            self._idle[self._why_idle] = self._idle.get(self._why_idle, 0.0) + now - self._idle_since
            self._idle_since = now

    def idle_share(self) -> float:
        self._settle_idle()
        elapsed = self._clock.now() - self._began
        return min(1.0, sum(self._idle.values()) / elapsed) if elapsed > 0 else 0.0

    def totals(self) -> dict[str, int]:
        return {"generated": self.generated, "failed": self.failed, "tokens": self.tokens}

    def summary(self) -> dict[str, Any]:
        """The rollouter's part of summary.json, evaluation aside. The Reward front counts failed trajectories."""
        self._settle_idle()
        return {
            "trajectories": {"generated": self.generated},
            "tokens": {"generated": self.tokens},
            "idle": {"rollouter": round(self.idle_share(), 4)},
            "rollout": {
                "failed": self.failed,
                **({"greedy": self.greedy} if self.greedy else {}),
                "finish_reasons": dict(self.finish_reasons),
                "versions_in_one_response_max": self.most_versions,
                "idle_seconds": {reason: round(seconds, 3) for reason, seconds in self._idle.items()},
                "wait_seconds": {reason: round(seconds, 3) for reason, seconds in self.waits.seconds.items()},
            },
        }

    def report(self) -> dict[str, float]:
        """Metrics since the last report, and totals."""
        now = self._clock.now()
        then, tokens, generated, truncated, failed = self._reported
        self._reported = (now, self.tokens, self.generated, self.truncated, self.failed)
        seconds = max(now - then, 1e-9)
        new = self.generated - generated
        metrics = {
            "rollouter/tokens_per_second": (self.tokens - tokens) / seconds,
            "rollouter/trajectories_per_second": new / seconds,
            "rollouter/failed": float(self.failed - failed),
            "rollouter/versions_in_one_response_max": float(self.most_versions),
            "rollouter/generating": float(self.active),
            "rollouter/blocked_seconds": sum(self.blocked.seconds.values()),
            "idle/rollouter": self.idle_share(),
        }
        if new:
            metrics["rollouter/response_tokens_mean"] = (self.tokens - tokens) / new
            metrics["rollouter/truncated_share"] = (self.truncated - truncated) / new
        for reason, count in self.finish_reasons.items():
            metrics[f"rollouter/finish/{reason}"] = float(count)
        for reason, waited in self.waits.seconds.items():
            metrics[f"rollouter/wait_seconds/{reason.replace(' ', '_')}"] = waited
        return metrics
