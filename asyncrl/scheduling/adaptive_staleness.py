"""`rollout.max_staleness: auto`: how many versions old tokens may become, adapted step by step. A state machine of plain values.

    starved  share of its time that the trainer waits for scored groups      high: generation may run further ahead, η + 1
    ess      effective sample size of the corrected tokens, in (0, 1]        low: the tokens are too old to learn from, η − 1

Both are judged over a window of steps in a row, after which a new window begins:

    ess < NARROW_BELOW                              η ← η − 1, not below the floor
    ess ≥ WIDEN_FROM and starved > STARVED_ABOVE    η ← η + 1, not above the ceiling; not where the last step up changed nothing
    else                                            η stays

After a change the groups that were admitted under the bound before it train first: they are not judged. Between NARROW_BELOW and
WIDEN_FROM lies the dead band, so that no bound is left for the one that it was reached from at the next noise.

The bound decides what is admitted. What may train is decided by the ceiling: a group that started under a wider bound is none too
old when the bound narrows, and nothing that was generated is thrown away for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_STEPS = 5  # at least
STARVED_ABOVE = 0.1
NARROW_BELOW = 0.8
WIDEN_FROM = 0.9
GAIN = 0.05  # by which `starved` falls at least where a wider bound is of use


@dataclass(frozen=True)
class BoundChange:
    """η before and now, and the figures that changed it."""

    before: int
    now: int
    starved: float
    effective_sample_size: float

    def __str__(self) -> str:
        why = "the trainer waits for data" if self.now > self.before else "the tokens are too far from the policy"
        return (
            f"staleness bound {self.before} → {self.now}: {why} (waiting {self.starved:.0%} of its time, effective sample size "
            f"{self.effective_sample_size:.3f})"
        )


@dataclass
class AdaptiveStaleness:
    """Invariants: floor ≤ bound ≤ ceiling; a change is by one, and two changes are at least a window apart; with equal figures
    and the same state, the same bounds follow.

    settling: steps that are not judged yet; steps, seconds, starved_seconds, ess_sum: of the window so far; starved_before: the
    share at which the bound was last widened, None where no step up has been tried since it narrowed.
    """

    floor: int
    ceiling: int
    publish_every: int = 1
    bound: int = field(init=False)
    settling: int = 0
    steps: int = 0
    seconds: float = 0.0
    starved_seconds: float = 0.0
    ess_sum: float = 0.0
    starved_before: float | None = None

    def __post_init__(self) -> None:
        self.bound = self.floor

    @property
    def window(self) -> int:
        """Steps that are judged together. Groups that started together end together, and the trainer waits once for all of them:
        a window has room for everything that may be live, and for whole versions."""
        versions = max(-(-WINDOW_STEPS // self.publish_every), self.bound + 1)
        return versions * self.publish_every

    def observe(self, *, seconds: float, starved_seconds: float, effective_sample_size: float | None) -> BoundChange | None:
        """Take a finished step in. seconds: since the last one's end; starved_seconds: of them, waiting for scored groups;
        effective_sample_size: None for a step that trained nothing, which says nothing."""
        if effective_sample_size is None:
            return None
        if self.settling:
            self.settling -= 1
            return None
        self.steps += 1
        self.seconds += seconds
        self.starved_seconds += starved_seconds
        self.ess_sum += effective_sample_size
        if self.steps < self.window:
            return None
        starved = self.starved_seconds / self.seconds if self.seconds > 0 else 0.0
        ess = self.ess_sum / self.steps
        self.steps, self.seconds, self.starved_seconds, self.ess_sum = 0, 0.0, 0.0, 0.0
        return self._judge(starved, ess)

    def state(self) -> dict[str, int | float | None]:
        """Plain values for a checkpoint."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: Mapping[str, int | float | None]) -> None:
        """Go on from `state`, within this floor and this ceiling."""
        for name in STATE:
            setattr(self, name, state[name])
        self.bound = max(self.floor, min(self.bound, self.ceiling))

    def _judge(self, starved: float, ess: float) -> BoundChange | None:
        if ess < NARROW_BELOW and self.bound > self.floor:
            self.starved_before = None
            return self._move(-1, starved, ess)
        if ess >= WIDEN_FROM and starved > STARVED_ABOVE and self.bound < self.ceiling and not self._was_of_no_use(starved):
            self.starved_before = starved
            return self._move(+1, starved, ess)
        return None

    def _was_of_no_use(self, starved: float) -> bool:
        """The trainer starves as it did before the last step up: generation is at its limit, whatever it may run ahead."""
        return self.starved_before is not None and abs(starved - self.starved_before) < GAIN

    def _move(self, by: int, starved: float, ess: float) -> BoundChange:
        before, self.bound = self.bound, self.bound + by
        self.settling = max(before, self.bound) * self.publish_every
        return BoundChange(before, self.bound, starved, ess)


STATE = ("bound", "settling", "steps", "seconds", "starved_seconds", "ess_sum", "starved_before")
