"""Paths in a configuration: which fields hold one, in which forms, and how they become absolute.

A relative path is taken from the working directory of the launch, wherever the pipeline file lies. The resolved config.yaml holds
absolute paths, so that it means the same from anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from asyncrl.config.entries import Entry, is_users
from asyncrl.config.functions import names_function
from asyncrl.config.schema import Config

S = TypeVar("S", bound=BaseModel)

NOT_IMPORTABLE = "<not importable>"
"""How a Python object that cannot be imported by name stands in config.yaml; what follows names the script that made it."""

DATA_SUFFIXES = (".jsonl", ".parquet")


def not_importable(script: str | Path) -> str:
    """What config.yaml says in place of a Python object that cannot be imported by name: that, and the script that made it."""
    return f"{NOT_IMPORTABLE} made by {script}"


def absolute_paths(config: Config, cwd: Path) -> Config:
    """The same configuration with every relative path made absolute from `cwd`."""
    functions = [_with(item, function=_source(item.function, cwd)) for item in config.reward.functions]
    data, mlflow, tokenizer, state_dir = config.data, config.tracking.mlflow, config.model.tokenizer, config.cluster.state_dir
    algorithm = config.algorithm
    own = {name: _named(getattr(algorithm, name), cwd) for name in ("advantage", "loss", "correction")}
    models = {
        name: _with(section, path=section.path and _folder(section.path, cwd))
        for name, section in (("critic", algorithm.critic), ("reference", algorithm.reference))
    }
    python, launcher, folder = config.inference.python, config.inference.launcher, config.sync.folder
    return _with(
        config,
        model=_with(config.model, path=_folder(config.model.path, cwd), tokenizer=tokenizer and _folder(tokenizer, cwd)),
        data=_with(data, train=_source(data.train, cwd), eval=data.eval and _source(data.eval, cwd)),
        rollout=_with(config.rollout, agent=_source(config.rollout.agent, cwd)),
        inference=_with(
            config.inference,
            python=python and (str(_absolute(Path(python), cwd)) if "/" in python else python),
            launcher=launcher and str(_absolute(Path(launcher), cwd)),
        ),
        reward=_with(config.reward, functions=functions),
        algorithm=_with(algorithm, **own, **models),
        tracking=_with(config.tracking, mlflow=mlflow and _with(mlflow, uri=_store(mlflow.uri, cwd))),
        sync=_with(config.sync, folder=folder and str(_absolute(Path(folder), cwd))),
        cluster=_with(config.cluster, state_dir=state_dir and str(_absolute(Path(state_dir), cwd))),
    )


def _with(section: S, **values: Any) -> S:
    """The section with these values; which of its fields the user has set stays what it was."""
    changed = {name: value for name, value in values.items() if value != getattr(section, name)}
    return section.model_copy(update=changed) if changed else section


def _named(entry: Entry, cwd: Path) -> Entry:
    """An entry whose name, where it is a function's in a file, has that file's whole path."""
    return _with(entry, name=_source(entry.name, cwd)) if is_users(entry.name) else entry


def _source(text: str, cwd: Path) -> str:
    """A data file or a `file.py:fn`; any other text (a built-in, a ready-made name, `pkg.mod:fn`) stays."""
    if names_function(text):
        place, _, name = text.rpartition(":")
        return f"{_absolute(Path(place), cwd)}:{name}" if place.endswith(".py") else text
    return str(_absolute(Path(text), cwd)) if text.endswith(DATA_SUFFIXES) and not text.startswith(NOT_IMPORTABLE) else text


def _folder(text: str, cwd: Path) -> str:
    """A model folder: what is written as a path, or lies under `cwd`; else a built-in or a hub name, which stay."""
    looks_like_path = text.startswith((".", "/", "~")) or text.count("/") > 1
    return str(_absolute(Path(text), cwd)) if looks_like_path or _absolute(Path(text), cwd).is_dir() else text


def _store(uri: str, cwd: Path) -> str:
    """MLflow's `sqlite:///relative.db` counts from the working directory of whoever opens it."""
    prefix = "sqlite:///"
    if uri.startswith(prefix) and not uri.startswith(prefix + "/") and uri != prefix and ":memory:" not in uri:
        return f"{prefix}{_absolute(Path(uri.removeprefix(prefix)), cwd)}"
    return uri


def _absolute(path: Path, cwd: Path) -> Path:
    """Absolute and without `..`, symbolic links left as they are."""
    expanded = path.expanduser()
    joined = expanded if expanded.is_absolute() else cwd / expanded
    parts: list[str] = []
    for part in joined.parts[1:]:
        if part == ".." and parts:
            parts.pop()
        elif part != "..":
            parts.append(part)
    return Path(joined.anchor, *parts)
