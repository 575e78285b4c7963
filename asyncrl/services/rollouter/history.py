"""eval.jsonl in the run directory: one line an evaluation, in order. A rollouter that takes a lost one's place reads it back.

{"occasion": "first" | "scheduled" | "last", "step", "score", "samples", "failed", "version_min", "version_max",
 "response_tokens_mean", "seconds", "by_source": {"gsm8k": {"score", "samples"}, …}}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from asyncrl.services.json_lines import append_line, is_up_to, keep_lines, read_lines

log = logging.getLogger(__name__)

FILE_NAME = "eval.jsonl"
Occasion = Literal["first", "scheduled", "last"]


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation. `step`: steps finished when it began; score: mean over `samples` scored responses, None when there is none;
    `failed`: responses wanted and not scored; the versions are those that its tokens were sampled under; `by_source`: score and
    samples by the rows' `data_source`, where they name one."""

    occasion: Occasion
    step: int
    score: float | None
    samples: int
    failed: int
    version_min: int | None
    version_max: int | None
    response_tokens_mean: float
    seconds: float
    by_source: Mapping[str, Mapping[str, float | int | None]] = field(default_factory=dict)


FIELDS = {each.name for each in fields(EvalRecord)}


class EvalHistory:
    """Every evaluation of the run so far. run_dir: None keeps nothing for a later life."""

    def __init__(self, run_dir: Path | None):
        self._file = run_dir / FILE_NAME if run_dir is not None else None
        self.records: list[EvalRecord] = []

    def resume(self, finished_steps: int) -> None:
        """As an earlier life left it; evaluations of steps that are not finished any more go."""
        if self._file is None:
            return
        try:
            keep_lines(self._file, is_up_to(finished_steps))
            self.records = [EvalRecord(**line) for line in read_lines(self._file) if line.keys() == FIELDS]
        except OSError as error:
            log.warning("%s cannot be read, earlier evaluations are not in the summary: %s", self._file, error)

    def add(self, record: EvalRecord) -> None:
        """A disk that refuses costs a later life this line; the run goes on."""
        self.records.append(record)
        if self._file is None:
            return
        try:
            append_line(self._file, asdict(record))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error)

    def newest(self, occasion: Occasion) -> EvalRecord | None:
        return next((record for record in reversed(self.records) if record.occasion == occasion), None)

    @property
    def last_step(self) -> int:
        """The step of the newest evaluation, 0 before the first."""
        return max((record.step for record in self.records), default=0)

    def summary(self) -> dict[str, Any]:
        """`first` and `last`: scores, null where that evaluation did not take place or scored nothing."""
        first, last = self.newest("first"), self.newest("last")
        return {
            "first": first.score if first else None,
            "last": last.score if last else None,
            "history": [asdict(record) for record in self.records],
        }
