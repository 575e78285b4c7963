"""Hearing: every row is asked for its summary again and again, so that one that hangs is known by its name, and one that is lost
leaves its last words.

A hang is counted in questions that stayed unanswered, one after the other, not in time: a launcher that was itself suspended
takes nobody for silent when it wakes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from asyncrl.errors import FrameError, RemoteError, TransportError
from asyncrl.services.supervisor.runtime import Row, RowFailed

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
PAUSE_SECONDS = 2.0
SUSPECT_QUESTIONS = 2

Ask = Callable[[Row, float], Awaitable[Mapping[str, Any]]]
"""(row, timeout) to the row's summary. Raises TransportError or FrameError."""


class Hearing:
    """`reports`: the last summary of every row that ever answered, by name. silence_seconds: so long, in questions, a row may be
    silent (longer than a suspended or swapping machine is gone, shorter than a person's patience)."""

    def __init__(
        self, ask: Ask, silence_seconds: float, *, answer_seconds: float = ANSWER_SECONDS, pause_seconds: float = PAUSE_SECONDS
    ):
        self.reports: dict[str, Mapping[str, Any]] = {}
        self._ask, self._answer_seconds, self._pause_seconds = ask, answer_seconds, pause_seconds
        self._questions = max(SUSPECT_QUESTIONS, round(silence_seconds / (answer_seconds + pause_seconds)))
        self._unanswered: Counter[Row] = Counter()

    async def until_silent(self, rows: Callable[[], Iterable[Row]]) -> RowFailed:
        """Ask `rows()` until one of them was silent for that long: its failure."""
        while True:
            await asyncio.sleep(self._pause_seconds)
            asked = list(rows())
            await self.ask(asked, self._answer_seconds)
            for row in asked:
                if self._unanswered[row] >= self._questions:
                    return self._failure(row, "it hangs, or was suspended (cluster.silence_seconds)")

    async def ask(self, rows: Iterable[Row], timeout: float) -> None:
        """One question to each."""
        await asyncio.gather(*(self._ask_one(row, timeout) for row in rows))

    def forget(self, row: Row) -> None:
        """A new process takes the row's place."""
        self._unanswered.pop(row, None)

    def culprit(self, failures: Sequence[RowFailed], rows: Iterable[Row]) -> RowFailed | None:
        """The row behind these failures, if all are of rows that waited in vain for another, and one does not answer."""
        suspects = [row for row in rows if self._unanswered[row] >= SUSPECT_QUESTIONS]
        if not suspects or any(failure.lost or not failure.reason.startswith("DeadlineExceeded") for failure in failures):
            return None
        silent = max(suspects, key=lambda row: self._unanswered[row])
        return self._failure(silent, f"{failures[0].row.name} waited for it in vain ({failures[0].reason})")

    async def _ask_one(self, row: Row, timeout: float) -> None:
        try:
            self.reports[row.name] = await self._ask(row, timeout)
            self._unanswered[row] = 0
        except RemoteError as error:  # it lives: its summary could not be made
            log.warning("%s has no summary: %s", row.name, error)
            self._unanswered[row] = 0
        except (TransportError, FrameError):
            self._unanswered[row] += 1

    def _failure(self, row: Row, why: str) -> RowFailed:
        seconds = self._unanswered[row] * (self._answer_seconds + self._pause_seconds)
        return RowFailed(row, f"its process has not answered for {seconds:.0f} s: {why}", lost=True)
