"""Small configurations, and wrong values for every kind of field."""

from __future__ import annotations

import copy
from types import NoneType
from typing import Any, get_args

from asyncrl.config.built import NOT_BUILT
from asyncrl.config.walk import Node, names_of, node

MINIMAL: dict[str, Any] = {
    "model": {"path": "builtin/arithmetic"},
    "data": {"train": "builtin/arithmetic"},
    "reward": {"functions": [{"function": "exact_match"}]},
    "training": {"steps": 30},
    "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 8},
}


SPECIAL: dict[str, Any] = {
    "inference.attach": [{"url": "http://127.0.0.1:30000"}],
    "inference.attach.url": "http://127.0.0.1:30001",
    "inference.attach.receiver": "tcp://127.0.0.1:30002",
    "inference.memory_fraction": 0.5,
    "inference.arguments": {"chunked-prefill-size": 2048, "enable-metrics": True},
    "reward.functions": [{"function": "numeric"}],
    "algorithm.loss.low": 0.5,
    "algorithm.correction.veto": None,
}
"""Good values that a field's type alone does not tell."""


def owner_of(key: str) -> str | None:
    """The first built entry that has the parameter `key`; None where it is no entry's, or only of entries that are not built."""
    section, _, leaf = key.rpartition(".")
    try:
        parent = node(section)
    except KeyError:
        return None
    if not parent.is_entry:
        return None
    owners = [model.model_fields["name"].default for model in parent.models if leaf in model.model_fields]
    return next((str(name) for name in owners if name in names_of(parent) and name not in NOT_BUILT[section]), None)


def is_built(key: str) -> bool:
    """Whether a file may hold the key: of an algorithm's entry, whether one that is built has it."""
    parts = key.split(".")
    return parts[0] != "algorithm" or len(parts) < 3 or (len(parts) == 3 and owner_of(key) is not None)


def at(values: dict[str, Any], key: str) -> tuple[Any, Any]:
    """The holder of a key and the key's last part, sections on the way made; of a list the first item is meant."""
    here: Any = values
    parts = key.split(".")
    for depth, part in enumerate(parts[:-1], 1):
        below = here.get(part)
        if isinstance(below, str):  # an entry by its name
            below = {"name": below}
        if below is None:
            below = good_value(node(".".join(parts[:depth]))) if node(".".join(parts[:depth])).is_list else {}
        here[part] = below
        here = below[0] if isinstance(below, list) else below
    return here, parts[-1]


def wrong_values(node: Node) -> list[Any]:
    """Values of other types than the field takes."""
    text, nullable = str(node.info.annotation), NoneType in get_args(node.info.annotation)
    if node.is_list:
        return [1, "text", {"a": 1}, [3], None] + ([[]] if node.required else [])
    if "dict" in text:
        return [1, "text", [1], {"a": [1]}, {"a": {"b": 1}}, {1: 2}, None]
    if node.models:
        return [1, 2.5, True, [1]] + ([] if node.is_entry else ["text"]) + ([] if nullable else [None])
    if names_of(node):
        return [1, 2.5, True, [1], {"a": 1}, "no_such_name"] + ([] if nullable else [None])
    wrong: list[Any] = [[1], {"a": 1}]
    if not nullable:
        wrong.append(None)
    if "str" in text:
        return [*wrong, 1, 2.5, True]
    if "bool" in text:
        return [*wrong, 1, 0, "true", 2.5]
    if "int" in text:
        return [*wrong, "1", 1.5, True, 2.0, 10**30]
    return [*wrong, "1", "1e-3", True, float("nan"), float("inf")]


def good_value(node: Node) -> Any:
    """A value that a field takes and that is not always its default."""
    names = names_of(node)
    if names:
        return names[0]
    if node.key in SPECIAL:
        return copy.deepcopy(SPECIAL[node.key])
    if not node.info.is_required():
        default = node.info.get_default(call_default_factory=True, validated_data={})
        if default is not None:
            return default.model_dump() if hasattr(default, "model_dump") else default
    text = str(node.info.annotation)
    return 64 if "int" in text else 64.0 if "float" in text else "builtin/arithmetic"
