"""Names of reward functions where figures are told, pure."""

from __future__ import annotations

import re
from collections.abc import Sequence


def component_names(functions: Sequence[str]) -> list[str]:
    """Short, distinct metric names: ``judge`` of ``my.rewards:judge``; a second one of that name is ``judge_2``."""
    names: list[str] = []
    for function in functions:
        short = re.sub(r"[^A-Za-z0-9_.-]", "_", function.rpartition(":")[2].strip("<>")) or "reward"
        name, count = short, 1
        while name in names:
            count += 1
            name = f"{short}_{count}"
        names.append(name)
    return names
