"""Figures of a step, from its groups. Pure; flat names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.messages import ScoredGroup


@dataclass(frozen=True)
class TrainedTokens:
    """Over the tokens left in the loss masks of the groups that trained: how many, of how many responses, version range,
    staleness."""

    tokens: int
    trajectories: int
    versions: tuple[int, int] | None
    staleness_sum: int
    staleness_max: int | None
    by_staleness: tuple[int, ...]


@dataclass(frozen=True)
class StepsOfAge:
    """Staleness in versions, told in steps: those made since the token's version. A version is as many steps as publish_every
    says, and `since_version` of them were finished since the newest one when the step began."""

    publish_every: int
    since_version: int

    @classmethod
    def at(cls, finished_steps: int, publish_every: int) -> StepsOfAge:
        return cls(publish_every, finished_steps % publish_every)

    def of(self, staleness: float) -> float:
        return float(staleness * self.publish_every + self.since_version)


NOTHING = TrainedTokens(0, 0, None, 0, None, ())


def trained_tokens(groups: Sequence[ScoredGroup], version: int) -> TrainedTokens:
    """groups: narrowed ones; `version` is the trainer's when the step began."""
    if not groups:
        return NOTHING
    mask = np.concatenate([group.loss_mask for group in groups])
    versions = np.concatenate([group.versions for group in groups])[mask].astype(np.int64)
    if not len(versions):
        return NOTHING
    lengths = np.concatenate([group.lengths for group in groups])
    response = np.repeat(np.arange(len(lengths)), lengths)  # that each token belongs to
    staleness = np.maximum(0, version - versions)
    return TrainedTokens(
        tokens=len(versions),
        trajectories=int(np.count_nonzero(np.bincount(response[mask]))),
        versions=(int(versions.min()), int(versions.max())),
        staleness_sum=int(staleness.sum()),
        staleness_max=int(staleness.max()),
        by_staleness=tuple(np.bincount(staleness).tolist()),
    )


def staleness_metrics(trained: TrainedTokens, ages: StepsOfAge) -> dict[str, float]:
    """Of the trained tokens: staleness/mean and /max in versions, /steps_mean and /steps_max in steps, and staleness/share_N."""
    if not trained.tokens or trained.staleness_max is None:
        return {}
    shares = {f"staleness/share_{level}": count / trained.tokens for level, count in enumerate(trained.by_staleness)}
    mean = trained.staleness_sum / trained.tokens
    return {
        "staleness/mean": mean,
        "staleness/max": float(trained.staleness_max),
        "staleness/steps_mean": ages.of(mean),
        "staleness/steps_max": ages.of(trained.staleness_max),
        **shares,
    }


def reward_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Over the scored members of every group that the step took: reward/…, each component, whatever reward functions logged."""
    if not groups:
        return {}
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    metrics = {"trajectories/unscored": float((~np.isfinite(rewards)).sum())}
    rewards = rewards[np.isfinite(rewards)]
    if len(rewards):
        metrics |= {f"reward/{name}": float(getattr(rewards, name)()) for name in ("mean", "std", "min", "max")}
    logged: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for name, values in group.components.items():
            logged[f"reward/{name}"] += filter(math.isfinite, values.tolist())
        for name, value in group.metrics.items():
            logged[f"reward/{name}"].append(value)
    return metrics | {name: sum(values) / len(values) for name, values in logged.items() if values and name not in metrics}


def greedy_metrics(groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
    """Of the greedy responses that are the groups' baselines: greedy/reward, their mean; greedy/staleness_max, of their oldest
    token when the step began. Nothing in a run without them."""
    greedy = [group.greedy for group in groups if group.greedy is not None]
    if not greedy:
        return {}
    return {
        "greedy/reward": sum(each.reward for each in greedy) / len(greedy),
        "greedy/staleness_max": float(max(0, *(version - each.oldest for each in greedy))),
    }


def teacher_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """teacher/log_ratio: mean of lp_teacher − lp_behaviour over the policy's tokens that the teacher judged; its negative
    estimates the reverse KL, which distillation lowers. Nothing in a run without a teacher."""
    judged = [group for group in groups if len(group.teacher_log_probs)]
    if not judged:
        return {}
    ratios = [(group.teacher_log_probs - group.log_probs)[group.loss_mask].astype(np.float64) for group in judged]
    finite = np.concatenate(ratios)
    finite = finite[np.isfinite(finite)]
    return {"teacher/log_ratio": float(finite.mean())} if len(finite) else {}


def response_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """response/tokens_mean, response/tokens_max, response/truncated (share that ended at the length limit)."""
    lengths = np.concatenate([group.lengths for group in groups]) if groups else np.zeros(0)
    if not len(lengths):
        return {}
    reasons = [reason for group in groups for reason in group.finish_reasons]
    return {
        "response/tokens_mean": float(lengths.mean()),
        "response/tokens_max": float(lengths.max()),
        "response/truncated": reasons.count("length") / len(reasons),
    }


@dataclass(frozen=True)
class Measure:
    """Of some groups' responses: how many, their tokens, how many are scored, the sum of their rewards."""

    responses: int = 0
    tokens: int = 0
    scored: int = 0
    reward: float = 0.0

    @classmethod
    def of(cls, groups: Sequence[ScoredGroup]) -> Measure:
        if not groups:
            return cls()
        lengths = np.concatenate([group.lengths for group in groups])
        rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
        rewards = rewards[np.isfinite(rewards)]
        return cls(len(lengths), int(lengths.sum()), len(rewards), float(rewards.sum()))

    def __add__(self, other: Measure) -> Measure:
        return Measure(
            self.responses + other.responses,
            self.tokens + other.tokens,
            self.scored + other.scored,
            self.reward + other.reward,
        )


def drop_bias(taken: Measure, expired: Measure) -> dict[str, float]:
    """What the steps took, against that and what expired before it: drop_bias/tokens, by how much its responses are longer, as a
    share; drop_bias/reward, by how much its mean reward is larger. Both 0 where nothing expired."""
    came = taken + expired
    if not (taken.tokens and taken.scored):
        return {}
    return {
        "drop_bias/tokens": (taken.tokens / taken.responses) / (came.tokens / came.responses) - 1,
        "drop_bias/reward": taken.reward / taken.scored - came.reward / came.scored,
    }


def ends_of_reward_curve(means: Sequence[float]) -> tuple[float | None, float | None]:
    """Means over the first and the last 5 % of steps, at least 5 (or as many as there are)."""
    if not means:
        return None, None
    window = min(len(means), max(5, -(-len(means) // 20)))
    return float(np.mean(means[:window])), float(np.mean(means[-window:]))
