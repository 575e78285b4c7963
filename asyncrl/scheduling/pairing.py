"""A sample's two verdicts, of the reward functions and of a teacher, which come in either order. Pure.

A sample that was expected is given out once, with the second of its verdicts; one that either has failed has failed.
"""

from __future__ import annotations

from asyncrl.messages import TrajectoryId
from asyncrl.protocols import Judgement
from asyncrl.scheduling.groups import MemberScore


class Pairing:
    """`expect`, then `score` and `judge`; each of the two returns the sample's whole score where it was the second."""

    def __init__(self) -> None:
        self._halves: dict[TrajectoryId, MemberScore | Judgement | None] = {}

    def __len__(self) -> int:
        """Samples that lack a verdict."""
        return len(self._halves)

    def expect(self, id: TrajectoryId) -> None:
        self._halves[id] = None

    def score(self, id: TrajectoryId, score: MemberScore) -> MemberScore | None:
        """What the reward functions said."""
        half = self._halves.get(id)
        if isinstance(half, Judgement):
            del self._halves[id]
            return _whole(score, half)
        if id in self._halves:
            self._halves[id] = score
        return None

    def judge(self, id: TrajectoryId, judgement: Judgement) -> MemberScore | None:
        """What the teacher said."""
        half = self._halves.get(id)
        if isinstance(half, MemberScore):
            del self._halves[id]
            return _whole(half, judgement)
        if id in self._halves:
            self._halves[id] = judgement
        return None


def _whole(score: MemberScore, judgement: Judgement) -> MemberScore:
    if judgement.log_probs is None:
        failure = score.failure or f"the teacher did not judge it: {judgement.failure}"
        return score._replace(reward=None, failure=failure)
    return score._replace(teacher_log_probs=judgement.log_probs)
