"""What MLflow is told about a run beside its metrics: parameters from the configuration, and tags."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

VERSIONED = ("asyncrl", "torch", "transformers", "ray", "mlflow")
KEY_CHARACTERS = 250  # MLflow's limits
VALUE_CHARACTERS = 6000
GIT_SECONDS = 5.0


def flattened(config: Mapping[str, Any]) -> dict[str, str]:
    """``{"training": {"steps": 3}}`` to ``{"training.steps": "3"}``; list entries by their index."""
    return {name_of(key): str(value)[:VALUE_CHARACTERS] for key, value in _leaves("", config)}


@lru_cache(maxsize=4096)
def name_of(text: str) -> str:
    """A parameter or metric name that MLflow accepts: letters, digits, and ``_-. :/``."""
    return re.sub(r"[^\w\-. :/]", "_", text, flags=re.ASCII)[:KEY_CHARACTERS]


def tags(folder: Path) -> dict[str, str]:
    """Versions of the packages that matter, and the git commit of `folder`, or where that lies in no repository of asyncrl's own
    code, if it does."""
    found = {f"version.{package}": version for package in VERSIONED if (version := _version(package)) is not None}
    commit = _git_commit(folder) or _git_commit(Path(__file__).parent)
    return {**found, "mlflow.source.git.commit": commit} if commit else found


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    entries: Any = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        yield prefix, value
    for key, entry in entries:
        yield from _leaves(f"{prefix}.{key}" if prefix else str(key), entry)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit(folder: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
