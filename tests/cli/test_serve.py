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
        (["builtin/arithmetic", "--host", "0.0.0.0"], "set ASYNCRL_TOKEN"),
        (["builtin/arithmetic", "--host", "198.51.100.9", "--token", "a" * 32], "no IPv4 address of this machine"),
        (["builtin/arithmetic", "--host", "0.0.0.0", "--token", "short"], "16 or more visible ASCII characters"),
    ],
)
def test_a_wrong_model_or_option_is_the_users_mistake(arguments: list[str], words: str) -> None:
    outcome = asyncrl("serve", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert "Traceback" not in outcome.err
