"""The staleness bound as the trainer keeps it: fixed, or, under `rollout.max_staleness: auto`, adapted after each step.

a step's figures ─▶ AdaptiveStaleness (pure) ─▶ its record in the ledger ─▶ the rollouter's admission
                                └─▶ checkpoint, metric staleness/bound, summary, log
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.scheduling.adaptive_staleness import AdaptiveStaleness

log = logging.getLogger(__name__)

SECONDS, STARVED_SECONDS = "time/step_s", "time/starved_s"
EFFECTIVE_SAMPLE_SIZE = "correction/effective_sample_size"


class StalenessBound:
    """`limit`: no token older than that trains, whatever the bound is now."""

    def __init__(self, config: Config):
        rollout = config.rollout
        self.limit = rollout.staleness_limit
        self._fixed = rollout.max_staleness if rollout.max_staleness != "auto" else None
        self._adaptive = AdaptiveStaleness(rollout.staleness_floor, rollout.staleness_ceiling, config.training.publish_every)
        self._sum = self._steps = 0

    @property
    def now(self) -> int:
        return self._adaptive.bound if self._fixed is None else self._fixed

    @property
    def to_tell(self) -> int | None:
        """What the ledger is told with a step: nothing where the bound is fixed, since everybody has it."""
        return self.now if self._fixed is None else None

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step's batch was admitted under `now`; `now` is afterwards what admission goes by next."""
        self._sum, self._steps = self._sum + self.now, self._steps + 1
        if self._fixed is not None:
            return
        change = self._adaptive.observe(
            seconds=metrics[SECONDS],
            starved_seconds=metrics[STARVED_SECONDS],
            effective_sample_size=metrics.get(EFFECTIVE_SAMPLE_SIZE),
        )
        if change is not None:
            log.info("step %d: %s", step, change)

    def summary(self) -> dict[str, Any]:
        """The bound's part of summary.json's `staleness`: over the steps of the run, in versions."""
        mean = self._sum / self._steps if self._steps else None
        return {"bound": self.limit, "bound_mean": mean, "bound_last": self.now}

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"sum": self._sum, "steps": self._steps, "adaptive": self._adaptive.state() if self._fixed is None else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. One that was taken under a fixed bound leaves an adapted one at its floor."""
        self._sum, self._steps = state["sum"], state["steps"]
        if self._fixed is None and state["adaptive"] is not None:
            self._adaptive.restore(state["adaptive"])
