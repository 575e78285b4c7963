"""`rollout.preset`: keys that make sense together only, under one name. Pure.

A preset sets what a file does not say. The resolved file says all of it, beside the preset's name, so that launching it again is
the same run; a key that says something else is refused (`checks_staleness`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "on_policy": {
        "rollout.max_staleness": 0,
        "training.mini_batches": 1,
        "training.epochs_per_batch": 1,
        "training.publish_every": 1,
    },
    "one_step_off": {
        "rollout.max_staleness": 1,
        "rollout.on_stale": "wait",
        "training.publish_every": 1,
    },
}
"""on_policy: the next batch starts when its policy is there. one_step_off: batch k + 1 is generated while batch k trains, and
nothing expires."""


def fill(values: dict[str, Any]) -> None:
    """Add to a file's values, in place, what its preset sets and they do not say. What is no preset, and what is no section, is
    left for the schema to refuse."""
    rollout = values.get("rollout")
    preset = rollout.get("preset") if isinstance(rollout, dict) else None
    for key, value in PRESETS.get(preset, {}).items() if isinstance(preset, str) else ():
        section, _, leaf = key.partition(".")
        holder = values.setdefault(section, {})
        if isinstance(holder, dict):
            holder.setdefault(leaf, value)
