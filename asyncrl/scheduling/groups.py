"""Trajectories in any interleaving to closed groups. Pure.

A group closes when each of its members is accounted for: scored, failed in generation, or failed in scoring. Members are its
`group_size` samples and, where the run has one, the greedy response that is their baseline; a group without its baseline has
failed. Every group that was begun and whose members all arrive closes exactly once. A second copy of a trajectory is dropped by
its id, also after its group has closed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.messages import GreedyResponse, GroupId, ScoredGroup, Trajectory, TrajectoryId
from asyncrl.messages.id_sets import RecentIds

CLOSED_REMEMBERED = 65_536
"""Ids of closed groups kept to know a late copy by: far more than close while a copy can be on its way."""

_NOTHING: Mapping[str, float] = MappingProxyType({})
_of_member = attrgetter(
    "response_tokens", "loss_mask", "log_probs", "versions", "finish_reason", "response", "start_version"
)  # what a scored group has of each


class MemberScore(NamedTuple):
    """How a member was scored: a finite reward, or None and the reason. `components`, `metrics` and `teacher_log_probs`:
    see `ScoredGroup`."""

    reward: float | None
    components: Mapping[str, float] = _NOTHING
    metrics: Mapping[str, float] = _NOTHING
    failure: str | None = None
    teacher_log_probs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class FailedGroup:
    """A closed group with fewer than `min_scored` scored samples, or without its greedy response, and why. `failures[i]` belongs
    to `trajectories[i]`."""

    id: GroupId
    reason: str
    trajectories: tuple[Trajectory, ...]
    failures: tuple[str | None, ...]


@dataclass
class GroupCounts:
    """Trajectories and groups seen so far. `duplicates`: second copies; `strays`: members that contradict their group's size;
    `late`: scores for a member that has one, or that nobody waits for."""

    trajectories: int = 0
    duplicates: int = 0
    strays: int = 0
    late: int = 0
    failed_generation: int = 0
    failed_scoring: int = 0
    scored: int = 0
    groups_scored: int = 0
    groups_failed: int = 0


@dataclass(slots=True)
class _Open:
    """num_scored: of the samples, the greedy response aside."""

    group_size: int
    num_scored: int = 0
    members: dict[int, Trajectory] = field(default_factory=dict)
    scores: dict[int, MemberScore] = field(default_factory=dict)


class GroupAssembler:
    """`accept` what arrives, `record` what it scored, `take_closed` what that completed. with_greedy: each group has a greedy
    response beside its samples."""

    def __init__(self, min_scored: int, *, with_greedy: bool = False):
        self._min_scored, self._with_greedy = min_scored, with_greedy
        self._open: dict[GroupId, _Open] = {}
        self._remembered = RecentIds(CLOSED_REMEMBERED)
        self._closed: list[ScoredGroup | FailedGroup] = []
        self.counts = GroupCounts()

    def accept(self, trajectory: Trajectory) -> bool:
        """Whether this trajectory is to be scored: it is new, fits its group, and was generated."""
        group_id, member, counts = trajectory.id.group, trajectory.id.member, self.counts
        group = self._open.get(group_id)
        if group_id in self._remembered or (group is not None and member in group.members):
            counts.duplicates += 1
            return False
        size = trajectory.group_size if group is None else group.group_size
        if not 0 <= member < size + self._with_greedy or trajectory.group_size != size:
            counts.strays += 1
            return False
        if group is None:
            group = self._open[group_id] = _Open(size)
        group.members[member] = trajectory
        counts.trajectories += 1
        if trajectory.failure is None:
            return True
        counts.failed_generation += 1
        self._settle(group_id, group, member, MemberScore(None, failure=trajectory.failure))
        return False

    def record(self, trajectory_id: TrajectoryId, score: MemberScore) -> None:
        """The outcome of scoring. Only the first for a trajectory counts."""
        group_id, member = trajectory_id.group, trajectory_id.member
        group = self._open.get(group_id)
        if group is None or member not in group.members or member in group.scores:
            self.counts.late += 1
            return
        if score.reward is None:
            self.counts.failed_scoring += 1
        else:
            assert math.isfinite(score.reward), score
            self.counts.scored += 1
            group.num_scored += member < group.group_size
        self._settle(group_id, group, member, score)

    def take_closed(self) -> list[ScoredGroup | FailedGroup]:
        """The groups that closed since the last call, in the order they closed."""
        closed, self._closed = self._closed, []
        return closed

    def open_groups(self) -> list[GroupId]:
        """Groups with a member here and not closed yet."""
        return list(self._open)

    @property
    def num_unscored(self) -> int:
        """Members that `accept` said to score and that have no outcome yet."""
        counts = self.counts
        return counts.trajectories - counts.failed_generation - counts.failed_scoring - counts.scored

    def close_incomplete(self) -> None:
        """Close as failed every group that still misses a member, because nothing more will arrive."""
        for group_id, group in list(self._open.items()):
            reason = f"members missing at the end of the data: {len(group.scores)} of {group.group_size + self._with_greedy} came"
            del self._open[group_id]
            self._remembered.add(group_id)
            self.counts.groups_failed += 1
            self._closed.append(_failed_group(group_id, group, reason))

    def _settle(self, group_id: GroupId, group: _Open, member: int, score: MemberScore) -> None:
        group.scores[member] = score
        if len(group.scores) < group.group_size + self._with_greedy:
            return
        del self._open[group_id]
        self._remembered.add(group_id)
        reason = _too_few(group) if group.num_scored < self._min_scored else _without_baseline(group)
        if reason is None:
            self.counts.groups_scored += 1
            self._closed.append(_scored_group(group_id, group))
        else:
            self.counts.groups_failed += 1
            self._closed.append(_failed_group(group_id, group, reason))


def _without_baseline(group: _Open) -> str | None:
    greedy = group.scores.get(group.group_size)
    return None if greedy is None or greedy.reward is not None else f"no baseline: the greedy response failed, {greedy.failure}"


def _too_few(group: _Open) -> str:
    failures = [group.scores[member].failure for member in range(group.group_size)]
    most_common = Counter(reason for reason in failures if reason is not None).most_common(1)
    why = f", {most_common[0][0]}" if most_common else ""
    return f"too few scored: {group.num_scored} of {group.group_size}{why}"


def _failed_group(group_id: GroupId, group: _Open, reason: str) -> FailedGroup:
    order = sorted(group.members)
    failures = tuple(group.scores[member].failure if member in group.scores else None for member in order)
    return FailedGroup(group_id, reason, tuple(group.members[member] for member in order), failures)


def _scored_group(group_id: GroupId, group: _Open) -> ScoredGroup:
    order = [member for member in sorted(group.members) if member < group.group_size]
    members = [group.members[member] for member in order]
    rewards, components, metrics, failures, judgements = zip(*[group.scores[member] for member in order], strict=True)
    tokens, masks, log_probs, versions, finish_reasons, responses, started = zip(*map(_of_member, members), strict=True)
    first = members[0]
    return ScoredGroup(
        id=group_id,
        group_size=group.group_size,
        start_version=min(started),  # members of one that was generated again differ
        prompt_tokens=next((m.prompt_tokens for m in members if len(m.prompt_tokens)), first.prompt_tokens),
        members=np.array(order, np.int32),
        lengths=np.array(list(map(len, tokens)), np.int32),
        response_tokens=np.concatenate(tokens),
        loss_mask=np.concatenate(masks),
        log_probs=np.concatenate(log_probs),
        versions=np.concatenate(versions),
        rewards=_or_nan(rewards),
        components={name: _or_nan([each.get(name) for each in components]) for name in _names(components)},
        finish_reasons=list(finish_reasons),
        failures=list(failures),
        prompt=first.prompt,
        responses=list(responses),
        ground_truth=first.ground_truth,
        metrics=_means([logged for logged, reward in zip(metrics, rewards, strict=True) if reward is not None]),
        greedy=_greedy_response(group) if group.group_size in group.members else None,
        teacher_log_probs=_judged(judgements, tokens),
    )


def _judged(judgements: Sequence[npt.NDArray[np.float32] | None], tokens: Sequence[Any]) -> npt.NDArray[np.float32]:
    """End to end, NaN for a member without; nothing where no member has any."""
    if all(judgement is None for judgement in judgements):
        return np.zeros(0, np.float32)
    parts = [
        np.full(len(own), np.nan, np.float32) if judgement is None else judgement
        for judgement, own in zip(judgements, tokens, strict=True)
    ]
    return np.concatenate(parts)


def _greedy_response(group: _Open) -> GreedyResponse:
    response, reward = group.members[group.group_size], group.scores[group.group_size].reward
    assert reward is not None, "a group without its baseline has failed"
    versions = response.versions[response.loss_mask].tolist() or [response.start_version]
    return GreedyResponse(float(np.float32(reward)), min(versions), max(versions))


def _or_nan(values: Sequence[float | None]) -> Any:
    return np.array([np.nan if value is None else value for value in values], np.float32)


def _names(mappings: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys([name for mapping in mappings for name in mapping]))


def _means(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the members that logged the name."""
    names = _names(mappings)
    values = {name: [mapping[name] for mapping in mappings if name in mapping] for name in names}
    return {name: sum(present) / len(present) for name, present in values.items()}
