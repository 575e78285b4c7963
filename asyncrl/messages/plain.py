"""Plain values: what a user's rows, chat messages and results become before a message carries them."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping
from typing import Any

import numpy as np

DEEPEST = 64


def plain(value: Any, at: str = "", depth: int = 0) -> Any:
    """The value as None, bool, int of 64 bits, float, str, lists, and mappings keyed by text, of exactly these types: what every
    message can carry. NumPy's values, subclasses, tuples, dates and decimals become it.

    at: where the value stands, for the message. Raises TypeError that says what cannot travel: "'when' holds a set".
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float | decimal.Decimal):
        return float(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise TypeError(f"{at!r} holds a whole number of more than 64 bits")
        return int(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping | list | tuple) and depth >= DEEPEST:
        raise TypeError(f"{at!r} holds parts more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        named = {str(key): part for key, part in value.items()}
        return {key: plain(part, f"{at}.{key}" if at else key, depth + 1) for key, part in named.items()}
    if isinstance(value, list | tuple):
        return [plain(part, at, depth + 1) for part in value]
    raise TypeError(f"{at!r} holds a {type(value).__name__}")
