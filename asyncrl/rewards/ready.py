"""Ready-made reward functions: 1.0 for a right answer, 0.0 for a wrong one.

An answer that is empty or holds no number is a wrong answer. A *ground truth* that cannot be compared with is a fault of the
data: the sample failed with that reason, it does not score 0. Where the ground truth is a list, any of its entries will do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from asyncrl.errors import RewardFailed

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9
WINDOW = 400
_NUMBER = re.compile(r"(?a)(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)?(?:(?<=\d)\.\d*|\.\d+)?(?:(?<=[\d.])[eE][-+]?\d+)?")


def exact_match(response: str, ground_truth: Any) -> float:
    """Whether the response is the ground truth, both as text with white space stripped from their ends; case matters."""
    answer = response.strip()
    return float(answer in [accepted.strip() for accepted in _texts(ground_truth)])


def contains(response: str, ground_truth: Any) -> float:
    """Whether the ground truth, as text with white space stripped from its ends, occurs in the response; case matters.
    An empty ground truth, which every response contains, is a fault of the data."""
    accepted = [text.strip() for text in _texts(ground_truth)]
    if not all(accepted):
        raise RewardFailed("ground_truth is empty, and every response contains that")
    return float(any(text in response for text in accepted))


def numeric(response: str, ground_truth: Any) -> float:
    """Whether the last number in the response equals the ground truth (a number, or text whose last number counts).

    Equal: within 1e-6 of the larger, or within 1e-9. A number is digits with an optional sign, thousands in groups of three
    after commas, decimals after a point, and an exponent: ``-1,234.50``, ``6e-3``. A sign after a letter or a digit is none
    (``3-5`` ends in 5), and what surrounds a number (``$``, ``%``, a full stop) is passed over.
    """
    answer = last_number(response)
    accepted = [_number(value) for value in _listed(ground_truth)]
    return float(answer is not None and any(_close(answer, value) for value in accepted))


def last_number(text: str) -> float | None:
    """The last number in a text, in the form that `numeric` reads; None where there is none. It is looked for in the WINDOW
    characters up to the text's last digit, so that a long answer of digits and commas costs no more than a short one."""
    end = next((place for place in range(len(text), 0, -1) if text[place - 1] in "0123456789"), 0)
    window = text[max(0, end - WINDOW) : end + WINDOW]
    found = [match.group() for match in _NUMBER.finditer(window) if any(character.isdigit() for character in match.group())]
    return float(found[-1].replace(",", "")) if found else None


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def _number(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    number = last_number(value) if isinstance(value, str) else None
    if number is None:
        raise RewardFailed(f"ground_truth {value!r} holds no number")
    return number


def _texts(ground_truth: Any) -> list[str]:
    return [str(value) for value in _listed(ground_truth)]


def _listed(ground_truth: Any) -> list[Any]:
    accepted = list(ground_truth) if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    if not accepted or None in accepted:
        raise RewardFailed("ground_truth is missing")
    return accepted


READY_MADE: dict[str, Callable[..., float]] = {"exact_match": exact_match, "contains": contains, "numeric": numeric}
