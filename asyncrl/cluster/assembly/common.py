"""What several builders share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.clock import SystemClock

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

CLOCK = SystemClock()
BUILTIN_SEED = 0  # built-in models are the same for every run, whatever the run's seed


def model_folder(model: str) -> Path | str:
    """Where the model of this `model.path` lies; a built-in one is made first, if it is not there yet."""
    from asyncrl.data.builtin import BUILTIN_PREFIX, arithmetic

    if not model.startswith(BUILTIN_PREFIX):
        return model
    from asyncrl.engines.builtin import prepare

    return prepare(model, arithmetic.examples(), seed=BUILTIN_SEED)


def away_seconds(config: Config) -> float:
    """How long a row may be away that is started again: its start, and what comes before it."""
    return 2 * config.cluster.start_timeout_seconds
