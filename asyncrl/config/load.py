"""From a pipeline file and its overrides to one validated Config; every problem at once, each with its line."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from asyncrl.config import built, presets
from asyncrl.config.paths import absolute_paths
from asyncrl.config.problems import found_problem, show
from asyncrl.config.schema import Config
from asyncrl.config.walk import node
from asyncrl.config.yaml_text import Path, read, write
from asyncrl.errors import ConfigError, Problem, UserError

LARGEST_BYTES = 2_000_000
"""Of a pipeline file; a page is 3,000."""


@dataclass(frozen=True)
class Places:
    """Where each key was said: a line of the file, or an override."""

    source: str | None = None
    lines: Mapping[Path, int] = field(default_factory=dict)
    overrides: Mapping[Path, str] = field(default_factory=dict)

    def locate(self, problem: Problem) -> Problem:
        """The same problem with its place: that of its key, or of the nearest key above that was said anywhere."""
        if problem.source is not None:
            return problem
        path: Path = tuple(int(part) if part.isdigit() else part for part in problem.key.split(".")) if problem.key else ()
        above = [path[:length] for length in range(len(path), -1, -1)]
        below = [override for override in self.overrides if path and override[: len(path)] == path]
        for said in (*above, *below):
            if said in self.overrides:
                return replace(problem, source=self.overrides[said], line=None)
        for said in above:
            if said in self.lines:
                return replace(problem, source=self.source, line=self.lines[said])
        return replace(problem, source=self.source)


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration, and where its keys were said (for the cross-checks' messages)."""

    config: Config
    places: Places = field(default_factory=Places)


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, cwd: FilePath | None = None) -> LoadedConfig:
    """Read, override and validate a pipeline file.

    Relative paths in it are taken from `cwd` (the working directory) and become absolute. Raises ConfigError with every problem
    that the schema finds, or UserError when the file cannot be read. Cross-checks are `asyncrl.config.checks`.
    """
    path = FilePath(path)
    document = read(_text(path), str(path))
    if not isinstance(document.value, dict):
        found = "the file is empty" if document.value is None else f"the file holds {show(document.value)}"
        message = f"{found}, but a pipeline file is a mapping of sections: start with `name: my_run`, or copy an example"
        raise ConfigError([Problem("", message, None, str(path))])
    return load_mapping(document.value, overrides, source=str(path), lines=document.lines, cwd=cwd)


def load_mapping(
    mapping: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str | None = None,
    lines: Mapping[Path, int] | None = None,
    cwd: FilePath | None = None,
) -> LoadedConfig:
    """The same for plain values, as the Python API has them."""
    values = copy.deepcopy(dict(mapping))
    problems: list[Problem] = []
    said: dict[Path, str] = {}
    for override in overrides:
        try:
            said[_apply(values, override)] = f"--set {override}"
        except ConfigError as error:
            problems += error.problems
    places = Places(source, lines or {}, said)
    presets.fill(values)
    problems += [places.locate(problem) for problem in _unbuilt(values)]
    refused = {problem.key for problem in problems}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _, problem = found_problem(detail)
            if problem.key not in refused:
                problems.append(places.locate(problem))
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: problem.line or 0))
    return LoadedConfig(absolute_paths(config, cwd or FilePath.cwd()), places)


def dump_config(config: Config) -> str:
    """The resolved, complete YAML: loading it again gives an equal Config."""
    return write(config.to_mapping())


def _text(path: FilePath) -> str:
    """The file's text. What is no short UTF-8 file (a folder, a device without end, a data file) is refused with the fix."""
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_BYTES + 1)
        if len(content) > LARGEST_BYTES:
            raise UserError(f"{path} is larger than {LARGEST_BYTES // 10**6} MB, and a pipeline file is a page: give that one")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no pipeline file {path}: give the path of one, such as pipelines/quickstart.yaml") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give the pipeline file in it, such as {path / 'pipeline.yaml'}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.object[error.start]:#04x} on line {error.object[: error.start].count(10) + 1}): "
            "save it as UTF-8"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a pipeline file that you may read") from None


def _apply(values: dict[str, Any], override: str) -> Path:
    """Put one `a.b=value` into `values`; a missing section is made on the way, a named entry widens to a mapping."""
    source = f"--set {override}"
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise ConfigError([Problem("", "an override is KEY=VALUE, such as training.steps=20", None, source)])
    value = _value(text, key, source)
    path: Path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    here: Any = values
    for depth, part in enumerate(path[:-1]):
        below = _item(here, part, key, source)
        if isinstance(below, str) and _is_entry(path[: depth + 1]):
            below = {"name": below}
        elif below is None:
            below = {}
        elif not isinstance(below, (dict, list)):
            above = ".".join(map(str, path[: depth + 1]))
            raise ConfigError([Problem(key, f"{key} cannot be set: {above} is {show(below)}, not a section", None, source)])
        here[part] = below
        here = below
    _item(here, path[-1], key, source)
    here[path[-1]] = value
    return path


def _value(text: str, key: str, source: str) -> Any:
    try:
        return read(text, source).value
    except ConfigError as error:
        raise ConfigError([replace(problem, key=key, line=None) for problem in error.problems]) from None


def _item(here: Any, part: str | int, key: str, source: str) -> Any:
    """`here[part]`, or None where a mapping lacks it. Raises ConfigError for a list's item that does not exist."""
    if isinstance(here, list):
        if not isinstance(part, int) or part >= len(here):
            message = f"{key} cannot be set: {part} is no item of a list of {len(here)}: count from 0, or give the whole list"
            raise ConfigError([Problem(key, message, None, source)])
        return here[part]
    return here.get(part)


def _is_entry(path: Path) -> bool:
    try:
        return node(".".join(map(str, path))).is_entry
    except KeyError:
        return False


def _unbuilt(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that the design knows and this build does not have."""
    for key in built.NOT_BUILT:
        section, _, leaf = key.partition(".")
        holder = values.get(section)
        if isinstance(holder, Mapping) and leaf in holder:
            message = built.refusal(key, holder[leaf])
            if message:
                yield Problem(key, message)
