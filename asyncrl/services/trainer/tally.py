"""What the leader counts: times of a step, idle shares by reason, and the totals that summary.json needs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.clock import Clock, IdleMeter
from asyncrl.protocols import StepOutcome
from asyncrl.services.trainer.figures import StepsOfAge, TrainedTokens, ends_of_reward_curve

KEPT = (
    "rewards", "tokens", "trajectories", "staleness_sum", "staleness_max", "age_sum", "age_max", "bad_steps", "bad_in_a_row",
)  # fmt: skip
WAITING_FOR_DATA = "scored groups"


@dataclass
class Tally:
    """Idleness counts from the first batch on: the run's start-up is nobody's idleness. staleness_…: in versions, age_…: the same
    in steps."""

    clock: Clock
    meter: IdleMeter = field(init=False)
    rewards: array[float] = field(default_factory=lambda: array("d"))  # one mean per step that had a reward
    tokens: int = 0
    trajectories: int = 0
    staleness_sum: int = 0
    staleness_max: int | None = None
    age_sum: float = 0.0
    age_max: int | None = None
    first_step_time: float | None = None  # wall time
    publish_seconds: float = 0.0
    bad_steps: int = 0
    bad_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.meter = IdleMeter(self.clock)
        self._step_began = self._batch_came = self._counts_since = self.clock.now()
        self._waited = self._starved = 0.0
        self._counting = False
        self._earlier = (0.0, 0.0)  # seconds waited and seconds passed, of earlier starts of the trainer

    def begin_step(self) -> None:
        """The step's batch is there."""
        self._batch_came = self.clock.now()
        if not self._counting:
            self.meter.restart()
            self._counting, self._counts_since = True, self._batch_came

    def end_step(self, outcome: StepOutcome, tokens: TrainedTokens) -> dict[str, float]:
        """Metrics of time and amount. time/step_s: since the last step's end; of it time/wait_s waiting (for groups, the
        ledger, a slot), time/starved_s of that for scored groups, and time/train_s since the batch was there; time/publish_s: of
        the publish before. Idle shares are of the run so far."""
        now, waited = self.clock.now(), sum(self.meter.seconds.values())
        starved = self.meter.seconds.get(WAITING_FOR_DATA, 0.0)
        figures = {
            "updates": float(outcome.updates),
            "updates/bad": float(outcome.bad_updates),
            "tokens/trained": float(tokens.tokens),
            "trajectories/trained": float(tokens.trajectories),
            "time/step_s": now - self._step_began,
            "time/wait_s": max(0.0, waited - self._waited),
            "time/starved_s": max(0.0, starved - self._starved),
            "time/train_s": now - self._batch_came,
            "time/publish_s": self.publish_seconds,
            "idle/trainer": self.idle_share(),
        }
        figures |= {f"idle/trainer/{reason.replace(' ', '_')}_s": seconds for reason, seconds in self.meter.seconds.items()}
        self._step_began, self._waited, self._starved = now, waited, starved
        return figures

    def add(self, tokens: TrainedTokens, ages: StepsOfAge, reward_mean: float | None, *, failed: bool) -> None:
        """A step is finished."""
        if reward_mean is not None:
            self.rewards.append(reward_mean)
        self.bad_steps += failed
        self.tokens += tokens.tokens
        self.trajectories += tokens.trajectories
        self.staleness_sum += tokens.staleness_sum
        if tokens.staleness_max is not None:
            self.staleness_max = max(tokens.staleness_max, self.staleness_max or 0)
            self.age_sum += tokens.tokens * ages.of(tokens.staleness_sum / tokens.tokens)
            self.age_max = max(int(ages.of(tokens.staleness_max)), self.age_max or 0)
        if self.first_step_time is None:
            self.first_step_time = self.clock.wall()

    def idle_share(self) -> float:
        """Waiting as a share of the time since the first batch, earlier starts of the trainer included; in [0, 1]."""
        waited, passed = self._idle()
        return min(1.0, waited / passed) if passed > 0 else 0.0

    def state(self) -> dict[str, Any]:
        """The totals, as plain values, for a later start to go on from."""
        return {**{name: getattr(self, name) for name in KEPT}, "rewards": self.rewards.tolist(), "idle": list(self._idle())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from these totals. `first_step_time` is this start's own: it says how long this start took."""
        for name in KEPT:
            setattr(self, name, state[name])
        self.rewards = array("d", state["rewards"])
        waited, passed = state["idle"]
        self._earlier = (float(waited), float(passed))

    def _idle(self) -> tuple[float, float]:
        """(seconds waited, seconds passed)."""
        waited, passed = self._earlier
        now = self.clock.now() - self._counts_since if self._counting else 0.0
        return waited + (sum(self.meter.seconds.values()) if self._counting else 0.0), passed + now

    def summary(self) -> dict[str, Any]:
        """The trainer's part of summary.json but `steps`, `policy_version` and the bound."""
        first, last = ends_of_reward_curve(self.rewards)
        staleness: dict[str, Any] = {"max": self.staleness_max, "steps_max": self.age_max}
        for name, total in (("mean", self.staleness_sum), ("steps_mean", self.age_sum)):
            staleness[name] = total / self.tokens if self.tokens else None
        return {
            "reward": {"first": first, "last": last},
            "staleness": staleness,
            "trajectories": {"trained": self.trajectories},
            "tokens": {"trained": self.tokens},
            "idle": {"trainer": round(self.idle_share(), 4)},
            "first_step_time": self.first_step_time,
        }
