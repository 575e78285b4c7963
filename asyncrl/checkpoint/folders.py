"""The folders of a run's checkpoints: which are complete, which are kept, and how one becomes complete.

state.json      {"format": 1, "step", "version", "incarnation", "world_size", "wall_s" (of the run so far), "config" (resolved),
                "tally" (what summary.json counts), "staleness_bound" (the bound, and what adapts it), "checkpoints_failed"
                (before it), "best": {"metric", "value"} or null, "files": {name: bytes}}
scores.json     beside the checkpoints: {"metric": checkpoint.best, "values": {step: value}}

`step_<n>` is complete: it was renamed to that name when every file of it was on the disk. `.step_<n>.writing` is not, and is
removed when next a checkpoint of that step is begun, or by `sweep_incomplete`.

A damaged checkpoint is passed over. One that may be whole and cannot be read here (no right to, a disk that errs, another format)
is not: a run that went on from an older one, or from nothing, would write over it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.durable import in_words, sync, sync_tree, walk, write_json
from asyncrl.errors import CheckpointError

log = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "checkpoints"
STATE_FILE, SCORES_FILE = "state.json", "scores.json"
NAME = re.compile(r"step_([0-9]{6,})")
INCOMPLETE = re.compile(r"\.step_[0-9]{6,}\.(writing|removed)")
WRITING, READING = "a checkpoint is written", "a checkpoint is read"
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "step": int, "version": int, "incarnation": int, "world_size": int, "wall_s": (int, float), "config": dict, "tally": dict,
    "files": dict,
}  # fmt: skip


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint. `state`: its state.json."""

    step: int
    version: int
    folder: Path
    state: Mapping[str, Any] = field(repr=False)

    @property
    def bytes(self) -> int:
        return sum(self.state["files"].values())


class Damaged(CheckpointError):
    """A folder that has a checkpoint's name and is none any more."""


class Checkpoints:
    """The checkpoints of one run. One process writes them (trainer/0); anybody may read.

    Whatever is removed, the newest complete checkpoint stays.
    """

    def __init__(self, run_dir: Path, *, keep: int = 1, best: str | None = None):
        """keep: newest ones that `prune` leaves; best: the metric whose highest value's checkpoint it leaves too."""
        assert keep >= 1, "the newest stays"
        self.folder = run_dir / FOLDER
        self._keep, self._best = keep, best

    def complete(self) -> list[CheckpointInfo]:
        """Oldest first. A folder that bears the name and cannot be read is left out, with a warning."""
        found = []
        for path in self._named():
            try:
                found.append(read_checkpoint(path))
            except CheckpointError as error:
                log.warning("left out: %s", error)
        return found

    def newest_complete(self) -> CheckpointInfo | None:
        """Those that are damaged are passed over, with a warning. Raises CheckpointError where it cannot be known."""
        for path in reversed(self._named()):
            try:
                return read_checkpoint(path)
            except Damaged as damaged:
                log.warning("passed over: %s", damaged)
        return None

    # ---- one checkpoint, from nothing to complete ---------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """An empty folder to write into. Raises CheckpointError where there can be none."""
        folder = self._incomplete(step)
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        except OSError as error:
            raise in_words(error, WRITING, self.folder) from error
        return folder

    def commit(self, step: int, state: Mapping[str, Any]) -> CheckpointInfo:
        """Every rank's files are written: add `state`, bring all of it to the disk, and give the folder its name.

        Raises CheckpointError and leaves what was there before.
        """
        folder, place = self._incomplete(step), self.folder / _name(step)
        try:
            files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in walk(folder) if path.is_file()}
            write_json(folder / STATE_FILE, {"format": FORMAT, **state, "files": files})
            sync_tree(folder)
            if place.exists():  # of an earlier life that went further than the one that was resumed
                self._remove(place)
            folder.rename(place)
            sync(self.folder)
        except OSError as error:
            raise in_words(error, WRITING, self.folder) from error
        return read_checkpoint(place)

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        _remove_tree(self._incomplete(step))

    # ---- what is kept ------------------------------------------------------------------------------------------

    def record(self, values: Mapping[int, float]) -> None:
        """Values of the metric `best` by step, as far as they are known by now. A checkpoint's value is the one of the newest
        step that is not after its own; a later call may know better. Raises CheckpointError when they cannot be written."""
        if self._best is None or not values:
            return
        scores = self._scores()
        steps = [_step(path) for path in self._named()]
        for step in steps:
            known = max((at for at, value in values.items() if at <= step and math.isfinite(value)), default=None)
            if known is not None:
                scores[step] = values[known]
        try:
            self._write_scores({step: scores[step] for step in steps if step in scores})
        except OSError as error:
            raise in_words(error, "scores.json is written", self.folder) from error

    def best(self) -> int | None:
        """The step of the checkpoint with the highest value, the earliest of several; None where no value is known."""
        here = {_step(path) for path in self._named()}
        scores = {step: value for step, value in self._scores().items() if step in here}
        return max(scores, key=lambda step: (scores[step], -step), default=None)

    def prune(self) -> list[int]:
        """Remove all but the newest `keep` and the best; the steps that went. What cannot be removed stays, with a warning."""
        try:
            complete, best = self.complete(), self.best()
        except CheckpointError as error:
            log.warning("no checkpoint is removed: %s", error)
            return []
        gone = []
        for each in complete[: -self._keep]:
            if each.step != best:
                try:
                    self._remove(each.folder)
                except OSError as error:
                    log.warning("%s cannot be removed: %s", each.folder, error)
                else:
                    gone.append(each.step)
        return gone

    def forget_after(self, step: int) -> None:
        """The run goes on from `step` (0: from nothing): what an earlier life saved after it, and its values, belong to a future
        that will not be. Raises CheckpointError where it stays: it would be taken for the newest."""
        try:
            for path in self._named():
                if _step(path) > step:
                    self._remove(path)
        except OSError as error:
            raise in_words(error, "what was saved after the step that a run goes on from is removed", self.folder) from error
        scores = self._scores()
        try:
            if any(at > step for at in scores):
                self._write_scores({at: value for at, value in scores.items() if at <= step})
        except OSError as error:
            log.warning("%s has values of another future, by which the best may be chosen: %s", self.folder / SCORES_FILE, error)

    def sweep_incomplete(self) -> None:
        """Remove what a dead process left half written. Only while nobody writes. Raises CheckpointError."""
        for path in self._entries():
            if INCOMPLETE.fullmatch(path.name):
                _remove_tree(path)

    def _named(self) -> list[Path]:
        """Folders with the name of a complete checkpoint, oldest first. Raises CheckpointError."""
        found = [path for path in self._entries() if NAME.fullmatch(path.name)]
        return sorted(found, key=_step)

    def _entries(self) -> list[Path]:
        """What lies in the folder; nothing where there is none. Raises CheckpointError for one that cannot be looked into."""
        try:
            return list(self.folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise in_words(error, READING, self.folder) from error

    def _incomplete(self, step: int) -> Path:
        return self.folder / f".{_name(step)}.writing"

    def _remove(self, place: Path) -> None:
        """First it loses its name, so that no moment shows a complete checkpoint with files missing. Raises OSError where it
        keeps that."""
        aside = self.folder / f".{place.name}.removed"
        _remove_tree(aside)
        place.rename(aside)
        _remove_tree(aside)

    def _scores(self) -> dict[int, float]:
        try:
            found = json.loads((self.folder / SCORES_FILE).read_text(encoding="utf-8"))
            if found["metric"] != self._best:
                return {}
            return {int(step): float(value) for step, value in found["values"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read, so no checkpoint is known as the best: %s", self.folder / SCORES_FILE, error)
            return {}

    def _write_scores(self, values: Mapping[int, float]) -> None:
        """Raises OSError."""
        write_json(self.folder / SCORES_FILE, {"metric": self._best, "values": values})


def read_checkpoint(folder: Path) -> CheckpointInfo:
    """The checkpoint in this folder, wherever it lies. Raises Damaged for one that is not whole, or none at all, and
    CheckpointError for one that cannot be read here."""
    state = _read_state(folder / STATE_FILE)
    for name, kind in FIELDS.items():
        if not isinstance(state.get(name), kind):
            raise _damaged(folder, f"its {STATE_FILE} has no {name}")
    for name, size in state["files"].items():
        if type(size) is not int:
            raise _damaged(folder, f"its {STATE_FILE} gives {name} the size {size!r}")
        try:
            found = (folder / name).stat().st_size
        except NOT_THERE:
            raise _damaged(folder, f"its file {name} is missing") from None
        except OSError as error:
            raise in_words(error, READING, folder) from error
        if found != size:
            raise _damaged(folder, f"its file {name} has {found} bytes, not {size}")
    return CheckpointInfo(state["step"], state["version"], folder, state)


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (*NOT_THERE, ValueError) as error:
        raise _damaged(file.parent, f"its {file.name} cannot be read ({error})") from error
    except OSError as error:
        raise in_words(error, READING, file.parent) from error
    if not isinstance(state, dict):
        raise _damaged(file.parent, f"its {file.name} holds no object")
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"this build reads checkpoints of format {FORMAT}, and {file.parent} is of format {state.get('format')}: use the "
            "version of asyncrl that wrote it"
        )
    return state


def _damaged(folder: Path, why: str) -> Damaged:
    return Damaged(f"a checkpoint is whole, and {folder} is not: {why}: use another one")


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _remove_tree(folder: Path) -> None:
    """As much as can be removed; what stays is said."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.warning("%s cannot be removed: remove it by hand", folder)
