"""quarantine.jsonl in the run directory: the prompts that are not generated any more, one a line, each named once in the log.

{"row": 17, "prompt": "the first words of it", "reasons": ["too few scored: 0 of 8, …", …]}
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from asyncrl.errors import RunError
from asyncrl.ledger.states import TRAINING_OVER
from asyncrl.protocols import End, Prompt
from asyncrl.scheduling.quarantine import Quarantine
from asyncrl.services.json_lines import append_line, keep_lines, read_lines

log = logging.getLogger(__name__)

FILE_NAME = "quarantine.jsonl"
NON_FINITE = "non-finite"  # the trainer's word for a batch whose every update was: not one prompt's fault
PROMPT_CHARACTERS = 200


class Sickbay:
    """`Quarantine`, with its file. failures: by row, as the ledger counts them. find: a row by its number."""

    def __init__(self, after: int, failures: Mapping[int, int], find: Callable[[int], Prompt], *, run_dir: Path | None):
        self._state = Quarantine(after, failures=failures, innocent=(TRAINING_OVER, NON_FINITE))
        self._find = find
        self._file = run_dir / FILE_NAME if run_dir is not None else None
        self._after = after
        self._resume()

    def __len__(self) -> int:
        """Prompts in quarantine."""
        return len(self._state)

    def note(self, ends: Iterable[End]) -> None:
        """What has ended, in order."""
        for end in ends:
            if self._state.note(end):
                self._tell(end.id.row)

    def reason(self, row: int) -> str | None:
        """Why an attempt of this row ends at once, or None."""
        return self._state.reason(row)

    def check(self, num_rows: int | None) -> None:
        """Raises RunError when there is nothing but quarantined prompts: the run would go round in circles."""
        if num_rows is not None and 0 < num_rows <= len(self):
            raise RunError(
                f"every prompt of data.train is in quarantine, {num_rows} of {num_rows} failed {self._after} times in a row "
                f"(rollout.quarantine_after); {self._state.reason(min(self._state.rows))}: {FILE_NAME} and failed_samples.jsonl "
                "in the run directory show the others"
            )

    def _resume(self) -> None:
        """The file of an earlier life keeps what still holds; what it lacks is told now."""
        rows, told = self._state.rows, set()
        if self._file is not None:
            try:
                keep_lines(self._file, lambda line: line.get("row") in rows)
                for line in read_lines(self._file):
                    told.add(line["row"])
                    self._state.remember(line["row"], line.get("reasons", ()))
            except OSError as error:
                log.warning("%s cannot be read: %s", self._file, error)
        for row in sorted(rows - told):
            self._tell(row)

    def _tell(self, row: int) -> None:
        log.warning("%s: this prompt is not generated any more", self._state.reason(row))
        if self._file is None:
            return
        line = {"row": row, "prompt": self._shown(row), "reasons": self._state.reasons(row)}
        try:
            append_line(self._file, line)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error)

    def _shown(self, row: int) -> str:
        prompt = self._find(row).prompt
        text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
        return text if len(text) <= PROMPT_CHARACTERS else text[: PROMPT_CHARACTERS - 1] + "…"
