"""Pydantic's errors in the words of this project: key, value found, what is wanted, and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from asyncrl.config import built
from asyncrl.config.entries import USERS, Entry, UserFunction
from asyncrl.config.section import HUGE, PATTERNS
from asyncrl.config.walk import ROOT, Node, names_of, nearest, nearest_key, node
from asyncrl.config.yaml_text import Path
from asyncrl.errors import Problem


def found_problem(error: ErrorDetails) -> tuple[Path, Problem]:
    """One pydantic error as (path in the document, problem without its place)."""
    path, at = _path_in_document(error["loc"])
    key = ".".join(map(str, path))
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        message = f"{key} is not a known key: the nearest known one is {_nearest(at, key)}"
    elif kind == "missing":
        message = f"{key} is missing, and has no default: give it {wanted(at)} ({lower_first(at.info.description or '')})"
    elif kind == "rule":
        message = error["msg"]
    elif kind in ("literal_error", "union_tag_invalid", "union_tag_not_found"):
        key, message = _unknown_name(at, path, value)
    elif kind == "finite_number":
        message = f"{key} is {show(value)}, but must be finite ({wanted(at)}){_example(at)}"
    elif kind == "huge":
        message = f"{key} is {show(value)}, and no run counts that far: give it {wanted(at)}, below {HUGE}"
    elif kind == "too_short" and at.is_list:
        message = f"{key} is empty, but must be {wanted(at)}: give it at least one"
    else:
        message = f"{key} is {show(value)}, but must be {wanted(at)}{_example(at)}"
    return path, Problem(key, message)


def wanted(at: Node) -> str:
    """What a field takes, in words: `a whole number, at least 1`."""
    if at.is_entry:
        own = f", your own {USERS}" if any(issubclass(model, UserFunction) for model in at.models) else ""
        return f"one of {', '.join(_built(at))}{own}, or a mapping with such a name and its parameters"
    if at.is_list:
        return f"a list of mappings with {_and(tuple(at.children()))}"
    names = _built(at)
    kind = f"one of {', '.join(names)}" if len(names) > 1 else names[0] if names else type_words(at.info.annotation)
    return ", ".join([kind, *bounds(at.info.metadata)])


def type_words(annotation: Any) -> str:
    """A type in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return ", ".join([type_words(args[0]), *bounds(args[1:])])
    if origin is Literal:
        return f"one of {', '.join(str(value) for value in args)}" if len(args) > 1 else str(args[0])
    if origin in (Union, UnionType):
        words = [type_words(arg) for arg in args if arg is not NoneType]
        return " or ".join([*words, "null"]) if NoneType in args else " or ".join(words)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with any of {', '.join(annotation.model_fields)}"
    if origin is dict:
        return "a mapping of names to values"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(annotation, str(annotation))


def bounds(metadata: Iterable[Any]) -> list[str]:
    """A field's constraints in words."""
    words = []
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=bound):
                words.append(f"at least {bound}")
            case annotated_types.Gt(gt=bound):
                words.append(f"above {bound}")
            case annotated_types.Le(le=bound):
                words.append(f"at most {bound}")
            case annotated_types.Lt(lt=bound):
                words.append(f"below {bound}")
            case annotated_types.MinLen(min_length=1):
                words.append("not empty")
            case _ if getattr(item, "pattern", None):
                words.append(PATTERNS[item.pattern])
    return words


def show(value: Any) -> str:
    """A value as the user would write it, with its kind where that is the point, cut at 60 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if not isinstance(value, (int, float)) else f"{value}"
    text = text if len(text) <= 60 else f"{text[:57]}…"
    kinds: list[tuple[type, str]] = [(str, "text"), (dict, "a mapping"), (list, "a list")]
    kind = next((name for cls, name in kinds if isinstance(value, cls)), None)
    return f"{text} ({kind})" if kind else text


def lower_first(sentence: str) -> str:
    """A description as part of another sentence."""
    return sentence[:1].lower() + sentence[1:].rstrip(".") if sentence[1:2].islower() else sentence.rstrip(".")


def _path_in_document(loc: tuple[int | str, ...]) -> tuple[Path, Node]:
    """The document's path and the schema's node: pydantic's location names a union's entry, the document does not."""
    path: list[int | str] = []
    here = ROOT
    for part in loc:
        if isinstance(part, int):
            path.append(part)
            continue
        if here.is_entry and len(here.models) > 1 and (part == USERS or part in names_of(here)):
            here = Node(here.key, (next(model for model in here.models if _tag(model) == part),), here.variants)
            continue
        children = here.children()
        if part in children:
            here = children[part]
        path.append(part)
    return tuple(path), here


def _nearest(parent: Node, key: str) -> str:
    """`parent` is the deepest known node above the unknown key; for an entry, narrowed to the one that was chosen."""
    leaf = key.rpartition(".")[2]
    if not parent.is_entry:
        return nearest_key(".".join(part for part in key.split(".") if not part.isdigit()))
    siblings = tuple(name for name in parent.children() if name != "name")
    likest = nearest(leaf, siblings)
    if likest is None:
        return f"{parent.key}.name ({names_of(parent)[0]} has no parameters)"
    return f"{parent.key}.{likest}"


def _unknown_name(at: Node, path: Path, value: Any) -> tuple[str, str]:
    """A name that none of the known ones is; `path` may end in an entry's own `name`."""
    key = ".".join(map(str, path))
    if at.key.endswith(".name") and node(at.key.removesuffix(".name")).is_entry:
        key = key.removesuffix(".name")
        at = node(at.key.removesuffix(".name"))
    if at.is_entry and isinstance(value, dict):
        value = value.get("name")
    refused = built.refusal(at.key, value)
    if refused:
        return key, refused
    names = _built(at)
    if not isinstance(value, str):
        return key, f"{key} is {show(value)}, but must be {wanted(at)}{_example(at)}"
    likest = nearest(value, (*names, *built.NOT_BUILT.get(at.key, ())))
    later = ", not built yet" if likest in built.NOT_BUILT.get(at.key, ()) else ""
    return key, f"{key} is {value!r}, which is not known: the nearest known one is {likest}{later} (there are {', '.join(names)})"


def _built(at: Node) -> list[str]:
    return [name for name in names_of(at) if name not in built.NOT_BUILT.get(at.key, ())]


def _tag(model: type[BaseModel]) -> str:
    """An entry's place in its union."""
    return USERS if issubclass(model, UserFunction) else str(model.model_fields["name"].default)


def parameter_message(kind: str, name: str, cls: type[Entry], error: ErrorDetails) -> str:
    """One pydantic error of an entry that was built from Python: `loss ppo_clip: clip_low is 2, but must be …`."""
    if error["type"] == "rule":
        return f"{kind} {error['msg']}"
    parts = [str(part) for part in error["loc"]]
    key, value = ".".join(parts), error["input"]
    info = cls.model_fields.get(parts[0]) if parts else None
    taken = [field for field in cls.model_fields if field != "name"]
    if error["type"] == "extra_forbidden":
        known = (
            f"the nearest known one is {nearest(parts[-1], taken)} (it takes {', '.join(taken)})" if taken else "it takes none"
        )
        return f"{kind} {name}: {key} is not a parameter: {known}"
    if error["type"] == "missing":
        return f"{kind} {name}: {key} is missing, and has no default: give {key}"
    if info is None or len(parts) > 1:
        return f"{kind} {name}: {key or 'its value'} is {show(value)}: {lower_first(error['msg'])}: mend it"
    limits = ", ".join([type_words(info.annotation), *bounds(info.metadata)])
    default = "" if info.is_required() else f", or leave it out for the default, {info.get_default(call_default_factory=True)}"
    return f"{kind} {name}: {key} is {show(value)}, but must be {limits}: give {key} so{default}"


def _example(at: Node) -> str:
    """The fix: a value of the kind wanted, or the default where there is a plain one."""
    default = at.info.default
    if at.info.is_required() or isinstance(default, BaseModel) or at.info.default_factory is not None:
        return ": write it so"
    plain = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
    return f": write it so, or leave it out for the default, {plain}"


def _and(names: tuple[str, ...]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
