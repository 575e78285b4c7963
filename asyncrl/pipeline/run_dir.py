"""The folder of a new run: checked before anything starts, and claimed by one run alone.

A run owns its folder from the moment that it has made ``config.yaml`` there, which only one of several can.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from asyncrl.checkpoint.folders import FOLDER as CHECKPOINTS
from asyncrl.config.load import dump_config
from asyncrl.config.schema import Config
from asyncrl.errors import UserError

A_RUNS_FILES = ("config.yaml", "run.json", "summary.json", "ledger.sqlite", "metrics.jsonl", "batches.jsonl")


def holds_a_run(folder: Path) -> bool:
    """Whether a run began there. Checkpoints alone are part of one too: a new run would write over them."""
    return any((folder / name).exists() for name in A_RUNS_FILES) or any((folder / CHECKPOINTS).glob("step_*"))


def check_run_dir(run_dir: str | os.PathLike[str] | None) -> None:
    """Raises UserError for a folder that holds a run, or that cannot be made or written to. Makes nothing."""
    if run_dir is None:
        return
    folder = Path(run_dir).absolute()
    if holds_a_run(folder):
        raise _holds_a_run(folder)
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir():
        raise UserError(f"--run-dir {folder} cannot be made ({nearest} is a file): choose a folder that you may write to")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"--run-dir {folder} cannot be made ({nearest} may not be written to): choose a folder that you may write to"
        )


def check_state_folder(run_dir: str | os.PathLike[str] | None, config: Config) -> None:
    """Raises UserError where the ledger and the queue's journal would lie on a network file system, or a run there has them
    elsewhere. Makes nothing."""
    from asyncrl.ledger.file_systems import refuse_another_ledger, state_folder

    folder = Path(run_dir or "runs").absolute()
    refuse_another_ledger(folder, state_folder(folder, config.cluster.state_dir))


def claim_run_dir(run_dir: str | os.PathLike[str] | None, config: Config) -> Path:
    """The absolute folder of this run alone, with ``config.yaml`` and ``logs/`` in it. Without `run_dir`: ``runs/<name>-<time>``,
    numbered where two runs start within a second. Raises UserError as `check_run_dir`."""
    if run_dir is not None:
        check_run_dir(run_dir)
        folder = Path(run_dir).absolute()
        if not _claim(folder, config):
            raise _holds_a_run(folder)
        return folder
    first = Path("runs").absolute() / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([first], (first.with_name(f"{first.name}-{number}") for number in itertools.count(2)))
    return next(folder for folder in names if _claim(folder, config))


def _claim(folder: Path, config: Config) -> bool:
    """False where another run was first."""
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with (folder / "config.yaml").open("x", encoding="utf-8") as file:
            file.write(dump_config(config))
    except FileExistsError:
        return False
    except OSError as error:
        raise UserError(f"--run-dir {folder} cannot be made ({error.strerror}): choose a folder that you may write to") from error
    return True


def _holds_a_run(folder: Path) -> UserError:
    return UserError(f"--run-dir {folder} already holds a run: let it go on with --resume auto, or choose a new folder")
