"""What the design names and this build does not have yet, so that a refusal can say so instead of "unknown".

Whoever builds a part takes its name out of here (and adds its entry to `asyncrl.config.entries` where it has parameters).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NOT_BUILT: Mapping[str, tuple[str, ...]] = {
    "algorithm.proximal": (),
    "algorithm.advantage": ("remax", "gdpo", "gae", "optimal_token_baseline", "tir_optimal_token_baseline"),
    "algorithm.loss": (),
    "algorithm.correction": (),
}  # fmt: skip

NOT_BUILT_PARAMETERS: Mapping[str, tuple[str, ...]] = {"algorithm.correction": ("veto",)}
"""Parameters of built entries that cannot be switched on yet."""


def refusal(key: str, value: Any) -> str | None:
    """Why `value` of `key` cannot be had in this build, or None. `value` is as written: a name or a mapping with one."""
    name = value.get("name") if isinstance(value, Mapping) else value
    if not isinstance(name, str) or name not in NOT_BUILT.get(key, ()):
        return None
    return f"{key} is {name}, which is known but not built yet: {_remedy(key)}"


def refused_parameters(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """(key, why) of each parameter of the entry at `key` that is switched on and not built yet."""
    if not isinstance(value, Mapping) or refusal(key, value):
        return
    for parameter in NOT_BUILT_PARAMETERS.get(key, ()):
        asked = value.get(parameter)
        if isinstance(asked, float) and 0 < asked < 1:  # any other value is the schema's to refuse
            below = f"{key}.{parameter}"
            yield below, f"{below} is known but not built yet: leave it out"


def _remedy(key: str) -> str:
    from asyncrl.config.walk import names_of, node

    built = [name for name in names_of(node(key)) if name not in NOT_BUILT[key]]
    return f"use one of {', '.join(built)}"
