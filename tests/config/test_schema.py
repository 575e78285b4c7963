"""Every field, walked: wrong types and unknown keys are refused by name, and every key is explained."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from asyncrl.config import built
from asyncrl.config.explain import explain_key
from asyncrl.config.load import load_mapping
from asyncrl.config.walk import Node, every_node
from asyncrl.errors import ConfigError, Problem
from tests.config.samples import MINIMAL, at, good_value, is_built, owner_of, wrong_values

ALL = tuple(every_node())
NODES = tuple(node for node in ALL if is_built(node.key))
PLACED = tuple(node for node in NODES if not node.key.endswith(".name") or not node.key.startswith("algorithm."))


def with_value(key: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(MINIMAL)
    holder, leaf = at(values, key)
    if leaf != "name" and owner_of(key):
        holder["name"] = owner_of(key)
    holder[leaf] = value
    return values


def problems_of(values: dict[str, Any]) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_mapping(values)
    return caught.value.problems


def bare(key: str) -> str:
    """A key without the numbers of list items."""
    return ".".join(part for part in key.split(".") if not part.isdigit())


@pytest.mark.parametrize("node", PLACED, ids=lambda node: node.key)
def test_every_field_set_to_a_wrong_type_is_refused_by_name(node: Node) -> None:
    for value in wrong_values(node):
        problems = problems_of(with_value(node.key, value))
        assert all(bare(problem.key).startswith(node.key) for problem in problems), (value, problems)
        assert all(bare(problem.key) in bare(problem.message) for problem in problems), (value, problems)


@pytest.mark.parametrize("node", [node for node in NODES if node.models], ids=lambda node: node.key)
def test_every_unknown_key_is_refused_with_the_nearest(node: Node) -> None:
    for child in node.children().values():
        leaf = child.key.rpartition(".")[2]
        if leaf == "name" or not is_built(child.key):
            continue
        misspelt = child.key + "z"
        values = with_value(child.key, good_value(child))
        holder, _ = at(values, child.key)
        holder[misspelt.rpartition(".")[2]] = holder.pop(leaf)
        messages = [problem.message for problem in problems_of(values) if bare(problem.key) == misspelt]
        assert len(messages) == 1, misspelt
        assert messages[0].endswith(f"the nearest known one is {child.key}"), messages


@pytest.mark.parametrize("node", [node for node in NODES if node.required], ids=lambda node: node.key)
def test_every_required_field_is_missed_by_name(node: Node) -> None:
    values = with_value(node.key, good_value(node))
    holder, leaf = at(values, node.key)
    del holder[leaf]
    problem = next(problem for problem in problems_of(values) if bare(problem.key) == node.key)
    assert "is missing" in problem.message


@pytest.mark.parametrize("node", ALL, ids=lambda node: node.key)
def test_every_key_has_a_sentence_and_is_explained(node: Node) -> None:
    explanation = explain_key(node.key)
    assert explanation.sentence.strip().endswith(".")
    assert explanation.takes
    assert explanation.required or explanation.parts or explanation.default is not None


@pytest.mark.parametrize(
    "key", [".".join(("zz", node.key)) for node in NODES[:3]] + ["training.publish_evry", "rolout.group_size"]
)
def test_explaining_an_unknown_key_names_the_nearest(key: str) -> None:
    with pytest.raises(ConfigError, match="the nearest known one is"):
        explain_key(key)


def test_a_misspelt_section_does_not_hide_the_key_below_it() -> None:
    with pytest.raises(ConfigError, match=r"the nearest known one is rollout\.group_size"):
        explain_key("rolout.group_size")


def test_a_parameter_of_an_entry_is_explained_under_its_field() -> None:
    explanation = explain_key("algorithm.loss.clip_low")
    assert (explanation.default, explanation.takes) == ("0.2 or 0.0003 or 0.4", "a number, above 0, below 1")


def test_explaining_a_field_of_names_says_which_are_not_built_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built, "NOT_BUILT", {"algorithm.advantage": ("to_come",)})
    choices = dict(explain_key("algorithm.advantage").choices)
    assert choices["to_come"] == "not built yet"
    assert choices["grpo"] != "not built yet"
