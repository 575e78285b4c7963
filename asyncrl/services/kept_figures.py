"""Figures that outlive the process that counts them: a small file of JSON lines in the run directory, the last whole one counts.

They say what was done, not where the run stands. A start from the checkpoint of step s sets the ledger back, and nothing here:
tokens that are generated a second time were generated twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from asyncrl.services.json_lines import read_lines

log = logging.getLogger(__name__)

LARGEST_BYTES = 1 << 20

Figures = Mapping[str, Any]


class KeptFigures:
    """What `keep` was told last is what the next process's `recall` returns, whenever this one is killed: each line is in the
    file when `keep` returns, and a torn one leaves those before it. Past LARGEST_BYTES the file begins anew, written aside and
    renamed (only that is on the disk at once: a power cut may take the figures since). file: None keeps nothing."""

    def __init__(self, file: Path | None = None):
        self._file = file
        self._lines: BinaryIO | None = None
        self._bytes = 0  # of the file

    def recall(self) -> Figures:
        """What an earlier process of this run kept last; empty where none did. Comes before the first `keep`."""
        if self._file is None:
            return {}
        try:
            lines = read_lines(self._file)
            figures = lines[-1] if lines else {}
            self._begin(self._file, figures)
        except OSError as error:
            self._give_up(error)
            return {}
        return figures

    def keep(self, figures: Figures) -> None:
        if self._file is None or self._lines is None:
            return
        try:
            self._bytes += self._lines.write(_line(figures))
            if self._bytes > LARGEST_BYTES:
                self._begin(self._file, figures)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Nothing is kept from now on."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _begin(self, file: Path, figures: Figures) -> None:
        aside = file.with_name(f".{file.name}.new")
        lines: BinaryIO = aside.open("wb", buffering=0)  # what is written is out of this process
        try:
            num_bytes = lines.write(_line(figures))
            os.fsync(lines.fileno())
            aside.replace(file)
        except OSError:
            lines.close()
            raise
        self.close()
        self._lines, self._bytes = lines, num_bytes

    def _give_up(self, error: OSError) -> None:
        """Figures are no reason to end a run."""
        log.error("%s is not kept any more (%s): figures will be lost with this process", self._file, error)
        self.close()


def _line(figures: Figures) -> bytes:
    return orjson.dumps(figures, option=orjson.OPT_APPEND_NEWLINE)
