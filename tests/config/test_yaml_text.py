"""YAML 1.2's plain values, lines, duplicate keys, and syntax errors with their place."""

from __future__ import annotations

import math

import pytest

from asyncrl.config.yaml_text import read
from asyncrl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("2.0e-4", 2e-4), ("1E5", 1e5), ("-.5", -0.5), ("3.", 3.0), ("+2", 2), ("0o17", 15), ("0x1f", 31),
        ("on", "on"), ("no", "no"), ("y", "y"), ("12:30", "12:30"), ("2026-01-02", "2026-01-02"), ("1_000", "1_000"), ("010", 10),
        ("true", True), ("False", False), ("~", None), ("null", None), ("'1'", "1"), ("", None), ("-.inf", -math.inf),
    ],
)  # fmt: skip
def test_plain_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = read(f"key: {text}", None).value["key"]
    assert found == value
    assert type(found) is type(value)


def test_every_key_and_item_has_its_line() -> None:
    document = read("a:\n  b: 1\n  c:\n    - x\n    - {d: 2,\n       e: 3}\n", None)
    assert document.lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", 0): 4, ("a", "c", 1): 5, ("a", "c", 1, "d"): 5,
                              ("a", "c", 1, "e"): 6}  # fmt: skip


def test_anchors_and_merge_keys_work_and_an_own_key_wins() -> None:
    document = read("base: &base {x: 1, y: 2}\nmine:\n  <<: *base\n  y: 3\n", None)
    assert document.value["mine"] == {"x": 1, "y": 3}
    assert document.lines[("mine", "y")] == 4


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("a: 1\nb: 2\na: 3", "a stands twice, on lines 1 and 3", 3),
        ("a:\n  b: 1\n  b: 2", r"a\.b stands twice, on lines 2 and 3", 3),
        ("a: [1", "not YAML", 1),
        ("a: 1\n\tb: 2", "not YAML.*indent with spaces", 2),
        ("a: one: two", "needs quotes", 1),
        ("a: !!python/object:os.system x", "not YAML", 1),
        ("a: &x [*x]", "alias", 1),
        ("1: x", "a key must be text", 1),
        ("? [a]\n: 1", "a key must be text", 1),
        ("--- 1\n--- 2", "single document", 2),
        ("a: 1\nb: \x00", "character U\\+0000: remove it", 2),
        ("a: " + "[" * 60 + "]" * 60, "levels", 1),
        ("a: " + "[" * 3000 + "]" * 3000, "levels", None),
        ("a: !!int x", "not YAML", None),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_line(text: str, words: str, line: int | None) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(text, "pipeline.yaml")
    assert caught.value.problems[0].line == line
    assert caught.value.problems[0].source == "pipeline.yaml"


def test_aliases_that_multiply_are_refused_before_they_fill_the_memory() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="aliases counted"):
        read("\n".join(lines), None)
