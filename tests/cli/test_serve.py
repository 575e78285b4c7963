"""`serve` refuses what it cannot serve before it loads anything."""

from __future__ import annotations

import pytest

from tests.cli.harness import asyncrl


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./missing"], "MODEL is ./missing, and there is no such folder"),
        (["builtin/arithmetik"], "builtin/arithmetic"),
        (["builtin/arithmetic", "--dtype", "float16"], "float32 or bfloat16"),
        (["builtin/arithmetic", "--context-tokens", "100000"], "lower it"),
        (["builtin/arithmetic", "--port", "70000"], "--port"),
    ],
)
def test_a_wrong_model_or_option_is_the_users_mistake(arguments: list[str], words: str) -> None:
    outcome = asyncrl("serve", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert "Traceback" not in outcome.err
