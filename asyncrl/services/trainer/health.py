"""Whether a run trains on what it should: figures with a sane range, and what to do where one leaves it. Pure.

A figure is judged by its running mean over about STEPS steps, so that one odd step is no alarm; it must come back well into its
range before the run counts as sound again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

log = logging.getLogger(__name__)
STEPS = 20
FIRST_STEPS = 5  # before any figure is judged
RETURN = 0.1  # of the bound, by which a figure is inside again


@dataclass(frozen=True)
class Rule:
    """low, high: the sane range. `first_share`: `low` is that share of the figure's mean over the first steps."""

    figure: str
    says: str
    remedy: str
    low: float | None = None
    high: float | None = None
    first_share: bool = False


RULES = (
    Rule(
        "correction/effective_sample_size",
        "of the trained tokens count for the gradient",
        "the policy has moved far from what sampled them: lower rollout.max_staleness or training.learning_rate",
        low=0.5,
    ),
    Rule(
        "correction/staleness_0/kl",
        "nats lie between server and trainer on tokens of the trainer's own version",
        "they compute different log-probs: see model.dtype, the servers' arguments, and the self-test's figures",
        high=0.02,
    ),
    Rule(
        "correction/dropped",
        "of the tokens are dropped by the correction",
        "widen its bounds, lower rollout.max_staleness, or use a correction that only weighs",
        high=0.5,
    ),
    Rule(
        "correction/vetoed",
        "of the tokens are dropped by the veto",
        "lower its bound algorithm.correction.veto, rollout.max_staleness or training.learning_rate",
        high=0.5,
    ),
    Rule(
        "policy/entropy",
        "nats of entropy are left, a small part of what there was at first",
        "the policy no longer explores: raise rollout.temperature, or lower training.learning_rate",
        low=0.05,
        first_share=True,
    ),
    Rule(
        "drop_bias/tokens",
        "is by how much responses that train are longer than all that came",
        "long responses expire: raise rollout.max_staleness, or set rollout.on_stale to wait",
        low=-0.1,
    ),
    Rule(
        "response/truncated",
        "of the responses end at rollout.max_response_tokens",
        "raise rollout.max_response_tokens, or reward shorter answers",
        high=0.5,
    ),
    Rule(
        "groups/without_signal",
        "of the groups have equal rewards, and teach nothing",
        "the task is too easy or too hard for this policy: choose other prompts, or set training.filter to refill",
        high=0.9,
    ),
)


@dataclass
class _Watched:
    mean: float = 0.0
    steps: int = 0
    first: float | None = None
    is_out: bool = False


@dataclass
class Health:
    """The rules, applied step by step. `lines`: a sentence for each figure that is out of its range now."""

    rules: tuple[Rule, ...] = RULES
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watched = {rule.figure: _Watched() for rule in self.rules}

    def judge(self, step: int, figures: Mapping[str, float]) -> None:
        """Take a step's figures in; those that it has not keep their means. Says in the log what changes."""
        self.lines = []
        for rule in self.rules:
            watched = self._watched[rule.figure]
            if rule.figure in figures:
                self._take(rule, watched, figures[rule.figure], step)
            if watched.is_out:
                self.lines.append(f"{rule.figure} {watched.mean:.3g}: {rule.says}; {rule.remedy}")

    def _take(self, rule: Rule, watched: _Watched, value: float, step: int) -> None:
        watched.steps += 1
        watched.mean += (value - watched.mean) / min(watched.steps, STEPS)
        if watched.steps == FIRST_STEPS:
            watched.first = watched.mean
        if watched.steps < FIRST_STEPS:
            return
        before, watched.is_out = watched.is_out, self._is_out(rule, watched)
        if watched.is_out and not before:
            log.warning("step %d: %s %.3g: %s; %s", step, rule.figure, watched.mean, rule.says, rule.remedy)
        elif before and not watched.is_out:
            log.warning("step %d: %s %.3g is in its sane range again", step, rule.figure, watched.mean)

    @staticmethod
    def _is_out(rule: Rule, watched: _Watched) -> bool:
        """Outside, or, where it was outside, not yet well inside."""
        low, high = rule.low, rule.high
        if rule.first_share and low is not None:
            low *= watched.first or 0.0
        slack = RETURN if watched.is_out else 0.0
        below = low is not None and watched.mean < low + slack * abs(low)
        above = high is not None and watched.mean > high - slack * abs(high)
        return below or above
