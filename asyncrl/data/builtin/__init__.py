"""Built-in tasks: rows made by a program, with a held-out part that never overlaps the training part."""

from __future__ import annotations

from typing import Any, Literal

from asyncrl.data.builtin import arithmetic
from asyncrl.errors import UserError

BUILTIN_PREFIX = "builtin/"
TASKS = {"builtin/arithmetic": arithmetic.rows}


def builtin_rows(name: str, split: Literal["train", "eval"], key: str) -> list[dict[str, Any]]:
    """The rows of one part of a built-in task. Raises UserError for a name that is none."""
    if name not in TASKS:
        raise UserError(f"{key} is {name!r}, which is no built-in task: there is {', '.join(TASKS)}")
    return TASKS[name](split)
