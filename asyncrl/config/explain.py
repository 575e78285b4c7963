"""One key in words: its sentence, what it takes, its default; for a section or an entry, what hangs under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl.config import built
from asyncrl.config.problems import wanted
from asyncrl.config.walk import Node, names_of, nearest_key, node
from asyncrl.config.yaml_text import write
from asyncrl.errors import ConfigError, Problem


@dataclass(frozen=True)
class Explanation:
    """default: YAML text, or None where the field is required or has parts. choices: each name with its sentence, or with ""
    where there is none. parts: keys below, each with its sentence."""

    key: str
    sentence: str
    takes: str
    required: bool
    default: str | None
    choices: tuple[tuple[str, str], ...]
    parts: tuple[tuple[str, str], ...]

    def to_mapping(self) -> dict[str, Any]:
        return {
            "key": self.key, "sentence": self.sentence, "takes": self.takes, "required": self.required, "default": self.default,
            "choices": dict(self.choices), "parts": dict(self.parts),
        }  # fmt: skip


def explain_key(key: str) -> Explanation:
    """Raises ConfigError that names the nearest key for one that is none."""
    try:
        at = node(key)
    except KeyError as error:
        raise ConfigError([Problem(key, f"{key} is not a known key: the nearest known one is {_nearest(key, error)}")]) from None
    return Explanation(
        key=at.key,
        sentence=" ".join(dict.fromkeys(variant.description or "" for variant in at.variants)),
        takes=wanted(at),
        required=at.required,
        default=_default(at),
        choices=_choices(at),
        parts=tuple((child.key, _sentence_of_part(at, name, child)) for name, child in at.children().items() if name != "name"),
    )


def _nearest(key: str, error: KeyError) -> str:
    """The nearest key part by part: a section that is misspelt does not hide what stands below it."""
    unknown = str(error.args[0])
    found, below = nearest_key(unknown), key[len(unknown) :]
    try:
        return node(found + below).key
    except KeyError as deeper:
        return nearest_key(str(deeper.args[0])) if node(found).models else found


def _default(at: Node) -> str | None:
    """The default as YAML; where entries share a parameter's name and not its default, each of them."""
    texts = dict.fromkeys(_default_text(variant) for variant in at.variants)
    return " or ".join(text for text in texts if text is not None) or None


def _default_text(info: FieldInfo) -> str | None:
    value = info.get_default(call_default_factory=True, validated_data={}) if not info.is_required() else PydanticUndefined
    if value is PydanticUndefined:
        return None
    if hasattr(value, "model_dump"):
        value = getattr(value, "name", None)
        if value is None:
            return None
    return write(value).removesuffix("\n").removesuffix("\n...")


def _choices(at: Node) -> tuple[tuple[str, str], ...]:
    later = tuple((name, "not built yet") for name in built.NOT_BUILT.get(at.key, ()))
    names = [name for name in names_of(at) if (name, "not built yet") not in later]
    if at.is_entry and len(at.models) > 1:
        sentences = {str(model.model_fields["name"].default): model.model_fields["name"].description or "" for model in at.models}
        return (*((name, sentences[name]) for name in names), *later)
    return (*((name, "") for name in names), *later)


def _sentence_of_part(parent: Node, name: str, child: Node) -> str:
    sentence = child.info.description or ""
    if not parent.is_entry or len(parent.models) == 1:
        return sentence
    owners = [str(model.model_fields["name"].default) for model in parent.models if name in model.model_fields]
    return f"{sentence} ({', '.join(owners)})"
