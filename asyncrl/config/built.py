"""What the design names and this build does not have yet, so that a refusal can say so instead of "unknown".

Whoever builds a part takes its name out of here (and adds its entry to `asyncrl.config.entries` where it has parameters).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_BUILT: Mapping[str, tuple[str, ...]] = {
    "algorithm.proximal": (),
    "algorithm.advantage": (),
    "algorithm.loss": (),
    "algorithm.correction": (),
    "algorithm.kl": (),
}  # fmt: skip


def refusal(key: str, value: Any) -> str | None:
    """Why `value` of `key` cannot be had in this build, or None. `value` is as written: a name or a mapping with one."""
    name = value.get("name") if isinstance(value, Mapping) else value
    if not isinstance(name, str) or name not in NOT_BUILT.get(key, ()):
        return None
    return f"{key} is {name}, which is known but not built yet: {_remedy(key)}"


def _remedy(key: str) -> str:
    from asyncrl.config.walk import names_of, node

    built = [name for name in names_of(node(key)) if name not in NOT_BUILT[key]]
    return f"use one of {', '.join(built)}"
