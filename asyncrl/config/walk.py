"""The schema as a tree of keys: what `load`, `explain`, `plan` and the property tests walk.

A key is a dotted path. List items are numbered (`reward.functions.0.weight`); where any item is meant the number is left out.
The parameters of algorithm entries hang under their field (`algorithm.loss.clip_low`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.config.entries import Entry, UserFunction
from asyncrl.config.schema import Config


@dataclass(frozen=True)
class Node:
    """One key of the schema. `models`: what its value may be made of: one section, or the entries that it can name; empty for a
    plain value. `variants`: the field as each entry declares it (more than one where entries share a parameter's name)."""

    key: str
    models: tuple[type[BaseModel], ...]
    variants: tuple[FieldInfo, ...]
    is_list: bool = False

    @property
    def info(self) -> FieldInfo:
        return self.variants[0]

    @property
    def is_entry(self) -> bool:
        return bool(self.models) and issubclass(self.models[0], Entry)

    @property
    def required(self) -> bool:
        return all(variant.is_required() for variant in self.variants)

    def children(self) -> dict[str, Node]:
        """Keys one level down, in the schema's order."""
        found: dict[str, list[FieldInfo]] = {}
        for model in self.models:
            for name, info in model.model_fields.items():
                found.setdefault(name, []).append(info)
        return {name: _node(f"{self.key}.{name}".lstrip("."), tuple(infos)) for name, infos in found.items()}


ROOT = Node("", (Config,), (FieldInfo(annotation=Config, description="A whole pipeline.yaml."),))


def every_node() -> Iterator[Node]:
    """All keys, depth first, in the order of the file; without the root."""

    def below(parent: Node) -> Iterator[Node]:
        for child in parent.children().values():
            yield child
            yield from below(child)

    return below(ROOT)


def node(key: str) -> Node:
    """The node of a dotted key; numbers that stand for list items are skipped. Raises KeyError with the part that is unknown."""
    here = ROOT
    for part in key.split("."):
        if part.isdigit() and here.is_list:
            continue
        children = here.children()
        if part not in children:
            raise KeyError(f"{here.key}.{part}".lstrip("."))
        here = children[part]
    return here


def names_of(of: Node) -> tuple[str, ...]:
    """The names that a field with a closed set of them takes: entries (a user's function apart, which has any) or a Literal's
    texts; empty for any other field."""
    if of.is_entry:
        named = [model.model_fields["name"] for model in of.models if not issubclass(model, UserFunction)]
        return tuple(str(name) for info in named for name in _literals(info.annotation))
    return tuple(value for variant in of.variants for value in _literals(variant.annotation) if isinstance(value, str))


def nearest(name: str, candidates: Iterator[str] | list[str] | tuple[str, ...]) -> str | None:
    """The candidate most like `name`, however far; None when there is none."""
    return max(candidates, key=lambda other: difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio(), default=None)


def nearest_key(unknown: str) -> str:
    """The known key that an unknown one most likely means: its likest sibling, or else the same name in another section."""
    parent_key, _, leaf = unknown.rpartition(".")
    siblings = tuple(node(parent_key).children() if parent_key else ROOT.children())
    likest = nearest(leaf, siblings)
    likeness = difflib.SequenceMatcher(None, leaf.lower(), (likest or "").lower()).ratio()
    if likest is None or likeness < 0.75:
        for other in every_node():
            if other.key.rpartition(".")[2] == leaf:
                return other.key
    return f"{parent_key}.{likest}".lstrip(".")


def _node(key: str, variants: tuple[FieldInfo, ...]) -> Node:
    models, is_list = _models(variants[0].annotation)
    return Node(key, models, variants, is_list)


def _models(annotation: Any) -> tuple[tuple[type[BaseModel], ...], bool]:
    """Models inside an annotation, looking through Annotated, unions and list; and whether they are a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,), False
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _models(args[0])
    if origin is list:
        return _models(args[0])[0], True
    if origin in (Union, UnionType):
        parts = [_models(arg) for arg in args]
        return tuple(model for models, _ in parts for model in models), any(is_list for _, is_list in parts)
    return (), False


def _literals(annotation: Any) -> tuple[Any, ...]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return args
    if origin is Annotated:
        return _literals(args[0])
    if origin in (Union, UnionType):
        parts = [_literals(arg) for arg in args if arg is not NoneType]
        return tuple(value for part in parts for value in part) if all(parts) else ()  # beside a number the set is not closed
    return ()
