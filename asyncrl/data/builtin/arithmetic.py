"""The arithmetic task: the prompt ``a+b+c=`` with single digits, the answer their sum.

A prompt is held out when the CRC-32 of its text is a multiple of five: a property of the text alone, so the parts cannot overlap.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any, Literal

HELD_OUT_ONE_IN = 5


def rows(split: Literal["train", "eval"]) -> list[dict[str, Any]]:
    """`prompt` and `ground_truth` of every prompt of that part, in the order of the digits."""
    return [{"prompt": prompt, "ground_truth": answer} for prompt, answer in _all() if held_out(prompt) == (split == "eval")]


def examples() -> list[tuple[str, str]]:
    """(prompt, answer) of the training part only: what a model may be warmed up on."""
    return [(row["prompt"], row["ground_truth"]) for row in rows("train")]


def held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % HELD_OUT_ONE_IN == 0


def _all() -> list[tuple[str, str]]:
    return [(f"{a}+{b}+{c}=", str(a + b + c)) for a, b, c in itertools.product(range(10), repeat=3)]
