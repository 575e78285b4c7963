"""The teacher beside the workers: every response goes to both, and is scored when both have answered."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asyncrl.messages import Trajectory, TrajectoryId
from asyncrl.protocols import Teacher
from asyncrl.scheduling.groups import MemberScore
from asyncrl.scheduling.pairing import Pairing

JUDGED_AT_ONCE = 64  # responses in one call of the teacher


class Judging:
    """Without a `teacher` the reward functions have the only word. `start(work)` runs a coroutine beside everything else;
    `record(id, score)` is told each whole score, and `answered()` when the teacher has answered a call."""

    def __init__(
        self,
        start: Callable[[Coroutine[Any, Any, None]], None],
        record: Callable[[TrajectoryId, MemberScore], None],
        answered: Callable[[], None],
    ):
        self.teacher: Teacher | None = None
        self._start, self._record, self._answered = start, record, answered
        self._pairing = Pairing()

    @property
    def num_waiting(self) -> int:
        """Responses that lack the teacher's word, or the functions'."""
        return len(self._pairing)

    def ask(self, trajectories: Sequence[Trajectory]) -> None:
        """The teacher is to judge these responses."""
        if self.teacher is None:
            return
        for trajectory in trajectories:
            self._pairing.expect(trajectory.id)
        for first in range(0, len(trajectories), JUDGED_AT_ONCE):
            self._start(self._judge(self.teacher, trajectories[first : first + JUDGED_AT_ONCE]))

    def scored(self, id: TrajectoryId, score: MemberScore) -> None:
        """What the reward functions said."""
        whole = score if self.teacher is None else self._pairing.score(id, score)
        if whole is not None:
            self._record(id, whole)

    async def _judge(self, teacher: Teacher, trajectories: Sequence[Trajectory]) -> None:
        judgements = await teacher.judge([(each.prompt_tokens, each.response_tokens) for each in trajectories])
        for trajectory, judgement in zip(trajectories, judgements, strict=True):
            whole = self._pairing.judge(trajectory.id, judgement)
            if whole is not None:
                self._record(trajectory.id, whole)
        self._answered()
