"""What the Reward front knows of a teacher: it judges responses that another policy sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Judgement(NamedTuple):
    """log_probs float32[R] of a response's tokens under the teacher, at the run's temperature; or None, and why."""

    log_probs: npt.NDArray[np.float32] | None
    failure: str | None = None


class Teacher(Protocol):
    """A frozen model with the student's vocabulary."""

    async def judge(self, samples: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]) -> list[Judgement]:
        """One each, in order, of (prompt int32[P], response int32[R]). Never raises for a sample, a server or a deadline."""

    async def close(self) -> None: ...
