"""YAML as pipeline files use it: the safe subset, YAML 1.2's plain values, no duplicate keys, and the line of every key.

YAML 1.2 differs from PyYAML's 1.1 in what a person expects: `1e-3` is a number; `on`, `no` and `12:30` are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from asyncrl.errors import ConfigError, Problem

Path = tuple[str | int, ...]

DEEPEST = 50
"""Levels below each other; the schema has five. PyYAML recurses, so the depth must end somewhere."""
MOST_VALUES = 100_000
"""Keys, items and values of one document, counted again wherever an alias repeats them: nine lines of aliases say a billion."""

_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^[-+]?(?:[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_CORE = (
    ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), "<"),
)


@dataclass(frozen=True)
class Document:
    """A YAML text: its value, and the 1-based line of each key and list item by path."""

    value: Any
    lines: dict[Path, int]


def read(text: str, source: str | None) -> Document:
    """Parse one document. Raises ConfigError for bad syntax, a duplicate or unusable key, a value that contains itself, and a
    document deeper than DEEPEST or larger than MOST_VALUES."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(None, {})
        walk = _Walk(source)
        walk.visit(node, (), ())
        if walk.problems:
            raise ConfigError(walk.problems)
        return Document(loader.construct_document(node), walk.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError([Problem("", f"not YAML: {what}{_fix(what)}", mark.line + 1 if mark else None, source)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            [Problem("", f"not YAML: it holds the character U+{error.character:04X}: remove it", line, source)]
        ) from None
    except RecursionError:
        raise ConfigError([_too_deep(None, source)]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([Problem("", f"not YAML: {error}", None, source)]) from None
    finally:
        if loader is not None:
            loader.dispose()


def write(value: Any) -> str:
    """YAML that `read` gives back unchanged, keys in their order."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=130)
    return str(text)


def _fix(what: str) -> str:
    """For the mistakes whose syntax error hides the cause."""
    if "'\\t'" in what:
        return ": indent with spaces, not with tabs"
    if "mapping values are not allowed" in what:
        return ": a text with `: ` in it needs quotes, and a key a space behind its colon"
    return ""


def _too_deep(line: int | None, source: str | None) -> Problem:
    return Problem("", f"more than {DEEPEST} levels lie in each other: a pipeline file needs five", line, source)


class _Walk:
    """Records lines, and finds duplicate keys before merge keys (`<<`) are flattened into the mapping."""

    def __init__(self, source: str | None):
        self.source = source
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self._values = 0

    def visit(self, node: yaml.Node, path: Path, above: tuple[yaml.Node, ...]) -> None:
        """`above`: the nodes that `node` stands in."""
        self._admit(node, above)
        above = (*above, node)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.start_mark.line + 1
                self.visit(item, (*path, index), above)
        elif isinstance(node, yaml.MappingNode):
            self._visit_keys(node, path, above)

    def _visit_keys(self, node: yaml.MappingNode, path: Path, above: tuple[yaml.Node, ...]) -> None:
        seen: dict[str, int] = {}
        for key, value in sorted(node.value, key=lambda pair: pair[0].tag != "tag:yaml.org,2002:merge"):
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    self.visit(merged, path, above)
                continue
            dotted = ".".join(map(str, (*path, key.value if isinstance(key, yaml.ScalarNode) else "?")))
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                message = f"{dotted} is no key: a key must be text: put it in quotes"
                self.problems.append(Problem(dotted, message, line, self.source))
                continue
            if key.value in seen:
                message = f"{dotted} stands twice, on lines {seen[key.value]} and {line}: keep one"
                self.problems.append(Problem(dotted, message, line, self.source))
            seen[key.value] = line
            self.lines[(*path, key.value)] = line
            self.visit(value, (*path, key.value), above)

    def _admit(self, node: yaml.Node, above: tuple[yaml.Node, ...]) -> None:
        line = node.start_mark.line + 1
        if any(node is outer for outer in above):
            raise ConfigError([Problem("", "an alias stands inside the value it names: write the value out", line, self.source)])
        if len(above) > DEEPEST:
            raise ConfigError([_too_deep(line, self.source)])
        self._values += 1
        if self._values > MOST_VALUES:
            message = f"more than {MOST_VALUES} values, aliases counted: a pipeline file is short; rows belong in data.train"
            raise ConfigError([Problem("", message, line, self.source)])


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own class attribute)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what either YAML version would read as something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        """Line breaks that only YAML knows survive in double quotes alone."""
        style = '"' if any(character in data for character in "\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("+", "")
    return int(text, 0) if text.lstrip("-")[:2] in ("0x", "0o") else int(text)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(inf|nan)$", r"\1", node.value.lower()))


for _tag, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(_tag, _pattern, list(_first))
    if _tag != "tag:yaml.org,2002:merge":
        _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))
_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
