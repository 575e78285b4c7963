"""What a step takes: the pick by `on_stale`, the zero-variance filter, and the narrowing of loss masks. Pure.

    arrivals ─▶ pool ─▶ ① expire ─▶ ② order ─▶ ③ filter, take up to G ─▶ ④ under `wait`: may these overtake? ─▶ step begins
                                                                                       └─ no ─▶ wait for what is on its way

With b finished steps, P = publish_every, G = groups_per_step, η = max_staleness: the trainer's version is v = b // P, and a group
whose oldest trainable token is of version o may train while b // P − o ≤ η, that is in steps that begin with
b < (o + η + 1)·P =: deadline. No token older than η ever stays in a loss mask (`narrow`), whatever the rules say.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from asyncrl.messages import GroupId, ScoredGroup

STALE = "stale"
ZERO_VARIANCE = "zero variance"
NO_TOKEN = "no trainable token"


@dataclass(frozen=True)
class SelectionRules:
    """The fields of `rollout` and `training` that decide a pick."""

    groups_per_step: int
    publish_every: int
    max_staleness: int
    on_stale: Literal["mask", "reissue", "wait"]
    filter: Literal["keep", "drop", "refill"]
    max_refill_factor: float

    def version(self, finished_steps: int) -> int:
        return finished_steps // self.publish_every

    def deadline(self, oldest: int) -> int:
        """A group whose oldest token has this version trains in a step that begins with fewer finished steps than this."""
        return (oldest + self.max_staleness + 1) * self.publish_every


@dataclass(frozen=True)
class Candidate:
    """What a pick needs to know of a scored group. oldest, newest: versions over its trainable tokens, None where it has none;
    equal_rewards: max = min over its scored members (one alone included) and, where it has one, its greedy response: no advantage
    differs from 0. Never of a group that a teacher judged."""

    id: GroupId
    oldest: int | None
    newest: int | None
    equal_rewards: bool

    @property
    def filtered_because(self) -> str | None:
        """Why the filter would drop it, or None."""
        if self.oldest is None:
            return NO_TOKEN
        return ZERO_VARIANCE if self.equal_rewards else None


@dataclass(frozen=True)
class Leaving:
    """A group that ends before the step takes it, so that another may fill its place."""

    id: GroupId
    state: Literal["expired", "filtered"]
    reason: str
    reissue: bool = False


@dataclass(frozen=True)
class Decision:
    """leaving: to be recorded at once. taken: the step begins with these (`trains` and `filtered` split them), or None: not yet.
    wanted: groups still missing; `out_of_order`: enough are here, but an older group on its way must go first."""

    leaving: tuple[Leaving, ...]
    taken: tuple[Candidate, ...] | None
    wanted: int = 0
    out_of_order: bool = False


class Selector:
    """The groups in the trainer's hands, and the next step's pick among them.

    Invariants: a group that was added is either in the pool, or in exactly one decision (leaving or taken); under `wait` none
    expires as long as admission kept its bound, for which every step takes G groups until the data ends: under `refill` at most
    ⌊max_refill_factor·G⌋ − G groups are replaced per step, and what the filter drops beyond them is taken as under `drop`.
    """

    def __init__(self, rules: SelectionRules):
        self.rules = rules
        self._pool: dict[GroupId, Candidate] = {}
        self._replaced = 0  # in the present step

    def __contains__(self, id: GroupId) -> bool:
        return id in self._pool

    def __len__(self) -> int:
        return len(self._pool)

    def add(self, candidate: Candidate) -> None:
        """A scored group has arrived."""
        self._pool[candidate.id] = candidate

    def decide(self, finished_steps: int, *, coming: Sequence[int] = (), closed: bool = False) -> Decision:
        """Begin a step, or say what it lacks.

        coming: `start_version` of every live group that is not in the pool (used under `wait` alone); closed: nothing more will
        come, so the step takes what there is, and none is taken only from an empty pool.
        """
        leaving = self._expire(finished_steps)
        taken, replaced = self._fill()
        leaving += replaced
        missing = self.rules.groups_per_step - len(taken)
        if missing and not (closed and taken):
            return Decision(tuple(leaving), None, wanted=missing)
        if self.rules.on_stale == "wait" and not closed and self._must_wait(finished_steps, taken, coming):
            return Decision(tuple(leaving), None, wanted=1, out_of_order=True)
        for candidate in taken:
            del self._pool[candidate.id]
        self._replaced = 0
        return Decision(tuple(leaving), tuple(taken))

    def wanted(self) -> int:
        """How many groups to ask for: what the step lacks; under `wait` everything that is there."""
        return 2**31 - 1 if self.rules.on_stale == "wait" else max(1, self.rules.groups_per_step - len(self._pool))

    def _expire(self, finished_steps: int) -> list[Leaving]:
        """`mask`: groups with no token left; otherwise groups with a token past the bound (under `wait` only where admission
        failed)."""
        oldest_allowed = self.rules.version(finished_steps) - self.rules.max_staleness
        expired = [candidate for candidate in self._pool.values() if self._is_past(candidate, oldest_allowed)]
        for candidate in expired:
            del self._pool[candidate.id]
        reissue = self.rules.on_stale == "reissue"
        return [Leaving(candidate.id, "expired", STALE, reissue) for candidate in expired]

    def _is_past(self, candidate: Candidate, oldest_allowed: int) -> bool:
        deciding = candidate.newest if self.rules.on_stale == "mask" else candidate.oldest
        return deciding is not None and deciding < oldest_allowed

    def _fill(self) -> tuple[list[Candidate], list[Leaving]]:
        """Take in order; under `refill` what the filter drops leaves the pool for good, up to the step's bound."""
        rules = self.rules
        replaceable = (
            int(rules.max_refill_factor * rules.groups_per_step) - rules.groups_per_step if rules.filter == "refill" else 0
        )
        taken: list[Candidate] = []
        replaced: list[Leaving] = []
        for candidate in self._ordered():
            if len(taken) == rules.groups_per_step:
                break
            reason = candidate.filtered_because
            if reason is not None and self._replaced < replaceable:
                self._replaced += 1
                del self._pool[candidate.id]
                replaced.append(Leaving(candidate.id, "filtered", reason))
            else:
                taken.append(candidate)
        return taken, replaced

    def _ordered(self) -> list[Candidate]:
        """As they came; under `wait` earliest deadline first, as they came within one deadline."""
        pool = list(self._pool.values())
        return sorted(pool, key=self._urgency) if self.rules.on_stale == "wait" else pool

    def _urgency(self, candidate: Candidate) -> int:
        return 2**31 if candidate.oldest is None else self.rules.deadline(candidate.oldest)

    def _must_wait(self, finished_steps: int, taken: Sequence[Candidate], coming: Sequence[int]) -> bool:
        """Whether some deadline D has more live groups left behind than fit in the steps until D, (D − b − 1)·G, and a group on
        its way could still go first in place of a taken one that is due later (else waiting would mend nothing)."""
        chosen = {candidate.id for candidate in taken}
        coming_due = [self.rules.deadline(start_version) for start_version in coming]
        behind = Counter(coming_due)
        behind.update(self._urgency(candidate) for candidate in self._pool.values() if candidate.id not in chosen)
        latest_taken = max((self._urgency(candidate) for candidate in taken), default=0)
        earliest_coming = min(coming_due, default=2**31)
        left = 0
        for deadline in sorted(behind):
            left += behind[deadline]
            room = (deadline - finished_steps - 1) * self.rules.groups_per_step
            if left > room and earliest_coming <= deadline < latest_taken:
                return True
        return False


def candidate_of(group: ScoredGroup) -> Candidate:
    """A scored group as a pick sees it."""
    rewards = [reward for reward in group.rewards.tolist() if math.isfinite(reward)]
    if group.greedy is not None:
        rewards.append(group.greedy.reward)
    equal = not len(group.teacher_log_probs) and (len(rewards) < 2 or max(rewards) == min(rewards))
    versions = group.versions[scored_mask(group)]
    if not len(versions):
        return Candidate(group.id, None, None, equal)
    return Candidate(group.id, int(np.minimum.reduce(versions)), int(np.maximum.reduce(versions)), equal)


def scored_mask(group: ScoredGroup) -> npt.NDArray[np.bool_]:
    """The loss mask without the tokens of members that have no reward: the group's own where all have one. bool[T]."""
    if all(map(math.isfinite, group.rewards.tolist())):
        return group.loss_mask
    scored: npt.NDArray[np.bool_] = np.repeat(np.isfinite(group.rewards), group.lengths)
    return group.loss_mask & scored


def narrow(group: ScoredGroup, *, version: int, max_staleness: int) -> ScoredGroup:
    """The group with a loss mask that holds no token of an unscored member, and none older than the bound allows at `version`;
    the group itself where it holds none of those."""
    mask, fresh = scored_mask(group), group.versions >= version - max_staleness
    if mask is group.loss_mask and np.logical_and.reduce(fresh):
        return group
    return dataclasses.replace(group, loss_mask=mask & fresh)


def split_filtered(
    taken: Iterable[Candidate], filter: Literal["keep", "drop", "refill"]
) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
    """(those that train, those that the step filters with their reason). `keep` filters only what has no token to train."""
    trains, filtered = [], []
    for candidate in taken:
        reason = candidate.filtered_because
        if reason is None or (filter == "keep" and reason == ZERO_VARIANCE):
            trains.append(candidate)
        else:
            filtered.append((candidate, reason))
    return trains, filtered
