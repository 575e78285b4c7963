"""What the front measures: where its time went, and what was scored."""

from __future__ import annotations

from collections import Counter

from asyncrl.clock import Clock, IdleMeter
from asyncrl.scheduling.groups import MemberScore


class ScoreMeter:
    """Idle is the time in which no sample waits for a worker or is at one: waiting for `rollouts`, or, while closed groups find
    no room, for the `scored` topic. It is counted from the first sample on."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._idle = IdleMeter(clock)
        self._busy = False
        self._blocked = False
        self._begun = False
        self._since = clock.now()
        self._sums: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()

    def busy(self, busy: bool) -> None:
        """Whether any sample is being scored or waits for it, from now on."""
        if busy and not self._begun:
            self._begun = True
            self._idle.restart()
            self._since = self._clock.now()
        self._change(busy, self._blocked)

    def blocked(self, blocked: bool) -> None:
        """Whether closed groups wait for room in the `scored` topic, from now on."""
        self._change(self._busy, blocked)

    def count(self, score: MemberScore) -> None:
        if score.reward is not None:
            self._add("reward", score.reward)
            for name, value in score.components.items():
                self._add(name, value)

    def means(self) -> dict[str, float]:
        """The reward and its components, over every scored sample so far."""
        return {name: self._sums[name] / self._numbers[name] for name in self._numbers}

    def idle_share(self) -> float:
        self._change(self._busy, self._blocked)
        return round(self._idle.share(), 4)

    def seconds(self) -> dict[str, float]:
        return dict(self._idle.seconds)

    def _change(self, busy: bool, blocked: bool) -> None:
        now = self._clock.now()
        if not self._busy and self._begun:
            self._idle.add("scored" if self._blocked else "rollouts", now - self._since)
        self._busy, self._blocked, self._since = busy, blocked, now

    def _add(self, name: str, value: float) -> None:
        self._sums[name] += value  # type: ignore[assignment]
        self._numbers[name] += 1
