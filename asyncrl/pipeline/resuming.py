"""Going on in the folder of a run that ended or died: whether, from where, and with what changed.

    folder holds a run? ─ no ─▶ a new run
        │ yes
        ├─ it lives                      ─▶ refused
        ├─ it finished, all steps made   ─▶ its summary
        └─ else: end what is left of it ─▶ compare the configurations ─▶ newest complete checkpoint, or step 0

A launcher holds a lock on the folder as long as it lives, so that no two go on with one run.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from asyncrl.checkpoint import Checkpoints
from asyncrl.config.changes import Change, changes
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import Config
from asyncrl.errors import UserError
from asyncrl.ledger.record import FILE_NAME, read_ledger
from asyncrl.pipeline.run_dir import holds_a_run
from asyncrl.pipeline.run_folder import RunFolder
from asyncrl.services.supervisor import Resume

log = logging.getLogger(__name__)
LOCK_FILE = ".launcher"


@dataclass(frozen=True)
class Takeover:
    """A run that goes on. `lock` is held until the launcher ends; `changed`: what is another value now, a line each."""

    folder: Path
    resume: Resume
    mlflow_run_id: str | None
    changed: tuple[str, ...]
    lock: IO[bytes]

    def words(self) -> tuple[str, ...]:
        """What a person is told, a line each."""
        checkpoint = f"from the checkpoint of step {self.resume.step}"
        where = checkpoint if self.resume.checkpoint else "from step 0, because it has no checkpoint"
        return (f"the run goes on {where}", *(f"changed: {line}" for line in self.changed))


def folder_to_resume(resume: str, run_dir: str | os.PathLike[str] | None) -> Path | None:
    """The folder whose run goes on, or None for a new run. resume: auto, never, or the folder itself. Raises UserError."""
    if resume == "never":
        return None
    if resume == "auto":
        return Path(run_dir).absolute() if run_dir is not None and holds_a_run(Path(run_dir)) else None
    folder = Path(resume).absolute()
    if run_dir is not None and Path(run_dir).absolute() != folder:
        raise UserError(
            f"--resume is {resume} and --run-dir is {run_dir}: a run goes on in its own folder, leave one of the two out"
        )
    if not holds_a_run(folder):
        raise UserError(f"--resume is {resume}, which holds no run: give auto, never, or the folder of a run")
    return folder


def finished_summary(folder: Path, config: Config) -> dict[str, Any] | None:
    """The summary of a run that has made all the steps that `config` asks for, or None."""
    summary = _run_folder(folder).summary
    if summary is None or summary["status"] != "finished":
        return None
    return summary if config.training.steps <= _config_before(folder).training.steps else None


def check_may_go_on(folder: Path, config: Config) -> tuple[RunFolder, list[Change]]:
    """The run, and what is another value under `config`. Raises UserError for one that lives, and for a change that it may not
    have; nothing is touched."""
    earlier = _run_folder(folder)
    if earlier.lives:
        raise _lives(folder)
    different = changes(_config_before(folder), config)
    if refused := [str(change) for change in different if change.reason is not None]:
        raise UserError("\n".join((f"the run in {folder} cannot go on under this configuration:", *refused)))
    return earlier, different


def take_over(folder: Path, config: Config) -> Takeover:
    """Make the folder ready for the run to go on under `config`. Raises UserError where it may not, and nothing is changed."""
    lock = _lock(folder)
    try:
        return _take_over(folder, config, lock)
    except BaseException:
        lock.close()
        raise


def _take_over(folder: Path, config: Config, lock: IO[bytes]) -> Takeover:
    earlier, different = check_may_go_on(folder, config)
    started = earlier.started or {}
    _end_what_is_left(started)
    checkpoints = Checkpoints(folder)
    checkpoints.sweep_incomplete()
    newest = checkpoints.newest_complete()
    incarnation = max(int(started.get("incarnation", 1)), _starts_in_ledger(folder)) + 1
    _change_config(folder, config, earlier=f"config.{incarnation - 1}.yaml")
    (folder / "summary.json").unlink(missing_ok=True)
    launches = 1 + len(list(folder.glob("config.*.yaml")))  # each but the present one left its configuration
    resume = Resume(incarnation, launches=launches)
    if newest is not None:
        resume = replace(resume, step=newest.step, checkpoint=str(newest.folder), wall_s=newest.state["wall_s"])
    return Takeover(folder, resume, started.get("mlflow_run_id"), tuple(map(str, different)), lock)


def _change_config(folder: Path, config: Config, *, earlier: str) -> None:
    """config.yaml is another from now on, and the one before is kept as `earlier`; at no moment is there none."""
    now, written = folder / "config.yaml", folder / "config.yaml.new"
    written.write_text(dump_config(config), encoding="utf-8")
    shutil.copyfile(now, folder / earlier)
    written.replace(now)


def _run_folder(folder: Path) -> RunFolder:
    """Also of a run that died before it could say that it lives."""
    if any((folder / name).exists() for name in ("run.json", "summary.json")):
        return RunFolder.open(folder)
    return RunFolder(folder, None, None)


def _starts_in_ledger(folder: Path) -> int:
    """The incarnation of the last start that the ledger has. Raises LedgerError for one that cannot be read."""
    if not (folder / FILE_NAME).exists():
        return 0
    starts = read_ledger(folder / FILE_NAME).starts
    return starts[-1].incarnation if starts else 0


def _config_before(folder: Path) -> Config:
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} has no config.yaml, so the run in it cannot go on: start a new run in another folder")
    return load_config(folder / "config.yaml").config


def _lock(folder: Path) -> IO[bytes]:
    file = (folder / LOCK_FILE).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise _lives(folder) from None
    return file


def lock_new(folder: Path) -> IO[bytes]:
    """The same lock, for a run that begins there."""
    return _lock(folder)


def _lives(folder: Path) -> UserError:
    return UserError(f"the run in {folder} is going on: wait for its end, or end it with `asyncrl stop {folder}`, then resume")


def _end_what_is_left(started: dict[str, Any]) -> None:
    """Of the earlier launch."""
    if (run_id := started.get("run_id")) is None:
        return
    from asyncrl.cluster.janitor import kill_marked
    from asyncrl.cluster.sweep import folders_of, remove_folders, remove_shared_memory

    if killed := kill_marked(run_id):
        log.warning("%d processes of the earlier launch were still there, and are ended", killed)
    remove_shared_memory(run_id)
    remove_folders(folders_of(run_id))
