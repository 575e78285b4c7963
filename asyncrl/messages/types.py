"""The two kinds of sample that travel, and their ids.

Shapes: P prompt tokens, R response tokens, n members of a group, T = sum of the members' response lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort", "failed"]
Json = Any  # what msgpack and JSON both carry: None, bool, int, float, str, list, dict with str keys


class GroupId(NamedTuple):
    """(epoch, row, attempt): one try at one prompt. Text form ``epoch/row/attempt``."""

    epoch: int
    row: int
    attempt: int

    def __str__(self) -> str:
        epoch, row, attempt = self
        return f"{epoch}/{row}/{attempt}"

    @classmethod
    def parse(cls, text: str) -> GroupId:
        epoch, row, attempt = (int(part) for part in text.split("/"))
        return cls(epoch, row, attempt)

    def member(self, member: int) -> TrajectoryId:
        return TrajectoryId(*self, member)


class TrajectoryId(NamedTuple):
    """(epoch, row, attempt, member). Text form ``epoch/row/attempt/member``."""

    epoch: int
    row: int
    attempt: int
    member: int

    def __str__(self) -> str:
        epoch, row, attempt, member = self
        return f"{epoch}/{row}/{attempt}/{member}"

    @classmethod
    def parse(cls, text: str) -> TrajectoryId:
        epoch, row, attempt, member = (int(part) for part in text.split("/"))
        return cls(epoch, row, attempt, member)

    @property
    def group(self) -> GroupId:
        return GroupId._make(self[:3])


@dataclass(frozen=True)
class Trajectory:
    """One response to one prompt.

    prompt_tokens int32[P]; response_tokens int32[R]; loss_mask bool[R] (True: the policy wrote this token);
    log_probs float32[R], the behaviour policy's, 0 where the mask is False; versions int32[R], the policy version whose
    weights computed that token's logits. `failure` names why a member could not be generated; then R = 0.
    `start_version` is the version that the servers had confirmed when the group was admitted. Members 0 … group_size − 1 are the
    samples; member `group_size`, of groups that have one, is the greedy response to the same prompt.
    """

    id: TrajectoryId
    group_size: int
    start_version: int
    prompt_tokens: npt.NDArray[np.int32]
    response_tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason
    prompt: Json  # text, or a list of chat messages
    response: str
    ground_truth: Json = None
    extra_info: dict[str, Json] = field(default_factory=dict)
    messages: list[Json] = field(default_factory=list)
    tool_calls: list[Json] = field(default_factory=list)
    generate_seconds: float = 0.0
    failure: str | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether this is its group's greedy response, which is scored and never trains."""
        return self.id.member == self.group_size


class GreedyResponse(NamedTuple):
    """What a scored group keeps of its greedy response: the reward, of float32 as the samples' are, and the oldest and newest
    version of its tokens."""

    reward: float
    oldest: int
    newest: int


@dataclass(frozen=True)
class ScoredGroup:
    """A closed prompt group with its rewards, its members' token arrays laid end to end.

    members int32[n], the members present, ascending; lengths int32[n], response tokens of each; response_tokens, loss_mask,
    log_probs, versions [T]; rewards float32[n], NaN where a member has none, and then `failures[i]` says why.
    `components[name]` float32[n] are the unweighted scores of each reward function. The greedy response is no member: `greedy`
    has its reward, None in a run that asks for none. teacher_log_probs float32[T] of a teacher, NaN for a member that it did not
    judge; of length 0 in a run without one.
    """

    id: GroupId
    group_size: int
    start_version: int
    prompt_tokens: npt.NDArray[np.int32]
    members: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    response_tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    rewards: npt.NDArray[np.float32]
    components: dict[str, npt.NDArray[np.float32]]
    finish_reasons: list[str]
    failures: list[str | None]
    prompt: Json
    responses: list[str]
    ground_truth: Json = None
    metrics: dict[str, float] = field(default_factory=dict)  # whatever else the reward functions logged, group means
    greedy: GreedyResponse | None = None
    teacher_log_probs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def num_scored(self) -> int:
        return int(np.isfinite(self.rewards).sum())
