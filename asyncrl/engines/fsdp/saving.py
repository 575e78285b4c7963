"""One save at a time: copied aside on the engine's thread, written on a thread of its own.

    begin ── copy aside ──▶ (the optimizer goes on)          finish: wait, then all ranks agree
                └─▶ thread: agree to write ─▶ StateFiles.write ─▶ model/ (rank 0) ─┘

The thread talks to the other ranks over a gloo group of its own and never over the engine's, so that a save cannot stand in the
way of a collective of training. After a failure the group is given up for a new one: nobody knows where its ranks stand.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.engines.fsdp.process_group import RankGroup, SideGroup
from asyncrl.engines.fsdp.state import Aside
from asyncrl.errors import CheckpointError, TransportError
from asyncrl.protocols import StateFiles

log = logging.getLogger(__name__)

MODEL_FOLDER = "model"
CLOSE_SECONDS = 5.0
TOO_LATE = "a checkpoint was not written in time: raise checkpoint.timeout_seconds, or look at the disk that holds it"


@dataclass(frozen=True)
class Saves:
    """How an engine's state lies in files. model_files: configuration and tokenizer by file name, in Hugging Face's form."""

    files: StateFiles
    model_files: Callable[[], Mapping[str, bytes]]


class _Save:
    """One save as its thread leaves it: `failure` is "" for a part that is written."""

    def __init__(self, failure: str):
        self.failure, self.seconds = failure, 0.0
        self.thread: threading.Thread | None = None

    def lives(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class Saver:
    """The saves of one rank's engine."""

    def __init__(self, saves: Saves, group: RankGroup, *, timeout_seconds: float):
        self._saves, self._group, self._timeout_seconds = saves, group, timeout_seconds
        self._aside = Aside()
        self._side: SideGroup | None = None
        self._save: _Save | None = None
        self._hung: _Save | None = None

    def begin(self, folder: str, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> float:
        """Returns the seconds that the copy took. What goes wrong on this rank alone is told to the others on the thread."""
        assert self._save is None, "a save is finished before the next begins"
        if self._side is None and self._group.world_size > 1:
            self._side = self._group.side_group(self._timeout_seconds)
        began = time.monotonic()
        copy, failure = self._copy(tensors)
        held = time.monotonic() - began
        self._save = save = _Save(failure)
        save.thread = threading.Thread(target=self._write, args=(save, folder, copy, self._side), name="checkpoint", daemon=True)
        save.thread.start()
        return held

    def done(self) -> bool:
        return self._save is None or not self._save.lives()

    def finish(self, timeout: float) -> float:
        """Seconds that the slowest rank wrote. Raises CheckpointError on every rank alike."""
        save, self._save = self._save, None
        assert save is not None, "a save was begun"
        assert save.thread is not None, "with its thread"
        save.thread.join(timeout)
        late = save.lives()
        if late:
            self._hung, self._aside = save, Aside()  # its thread still reads the copy
        mine = TOO_LATE if late else save.failure
        said = [text.split(" ", 1) for text in self._group.gather_texts(f"{save.seconds} {mine}")]
        failures = {rank: failure for rank, (_, failure) in enumerate(said) if failure}
        if not failures:
            return max(float(seconds) for seconds, _ in said)
        if self._side is not None and not late:
            self._side.close()
        self._side = None
        raise CheckpointError(_in_one(failures))

    def close(self) -> None:
        """A save that is under way is waited for a moment, and left incomplete after it."""
        for save in (self._save, self._hung):
            if save is not None and save.thread is not None:
                save.thread.join(CLOSE_SECONDS)

    def _copy(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> tuple[Mapping[str, torch.Tensor], str]:
        """(copy, why there is none)."""
        if self._hung is not None and self._hung.lives():
            return {}, "the save before it still hangs in a write: look at the disk"
        self._hung = None
        try:
            return self._aside.copy(tensors()), ""
        except (RuntimeError, MemoryError) as error:  # torch says RuntimeError where memory is short
            self._aside = Aside()
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            return {}, f"model and optimizer must be copied aside to be saved, and that failed ({why}): free memory on this host"

    def _write(self, save: _Save, folder: str, copy: Mapping[str, torch.Tensor], side: SideGroup | None) -> None:
        """The thread. Its failure is kept for `finish`."""
        began = time.monotonic()
        try:
            failures = [save.failure] if side is None else side.gather_texts(save.failure)
            save.failure = _in_one({rank: failure for rank, failure in enumerate(failures) if failure})
            if not save.failure:
                self._saves.files.write(folder, copy, None if side is None else side.group)
                if self._group.rank == 0:
                    self._write_model(Path(folder) / MODEL_FOLDER)
        except (CheckpointError, TransportError) as error:
            save.failure = str(error)
        except Exception as bug:  # the boundary of the thread: a save that fails ends no run, whatever made it fail
            log.exception("a save failed")
            save.failure = f"{type(bug).__name__}: {bug}"
        save.seconds = time.monotonic() - began

    def _write_model(self, folder: Path) -> None:
        try:
            folder.mkdir()
            for name, content in self._saves.model_files().items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
        except OSError as error:
            raise CheckpointError(
                f"a checkpoint is written as a whole or not at all, and {error.filename or folder} gave {error.strerror!r}: look "
                f"at the disk that holds {folder.parent}"
            ) from error


def _in_one(failures: Mapping[int, str]) -> str:
    """What the ranks (of those that failed) say, once where they say the same."""
    different = set(failures.values())
    if len(different) < 2:
        return next(iter(different), "")
    return "; ".join(f"trainer/{rank}: {failure}" for rank, failure in failures.items())
