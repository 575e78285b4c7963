"""What a file says wrong about staleness: a preset and a key that contradict each other, an adaptive bound that could not adapt.
Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from asyncrl.config.facts import Facts
from asyncrl.config.presets import PRESETS
from asyncrl.config.schema import Config
from asyncrl.errors import Problem


def check_preset(config: Config, facts: Facts) -> Iterator[Problem]:
    """A key that says something else than the preset. What a file leaves out has the preset's value by now."""
    preset = config.rollout.preset
    for key, value in PRESETS[preset].items() if preset is not None else ():
        found = operator.attrgetter(key)(config)
        if found != value:
            yield Problem(
                key,
                f"{key} is {found}, but rollout.preset {preset} sets it to {value}: leave {key} out, or set rollout.preset to "
                "null and each key by itself",
            )


def check_adaptive(config: Config, facts: Facts) -> Iterator[Problem]:
    """A range without room, or no figure that could tell when tokens are too old."""
    rollout = config.rollout
    if rollout.max_staleness != "auto":
        return
    if rollout.staleness_floor >= rollout.staleness_ceiling:
        yield Problem(
            "rollout.staleness_ceiling",
            f"rollout.staleness_ceiling is {rollout.staleness_ceiling} and rollout.staleness_floor {rollout.staleness_floor}, "
            "which leaves nothing to adapt: raise the ceiling above the floor, or set rollout.max_staleness to a number",
        )
    if config.algorithm.proximal == "behave":
        yield Problem(
            "rollout.max_staleness",
            "rollout.max_staleness is auto, which narrows when the effective sample size of the tokens falls, but with "
            "algorithm.proximal behave every weight is 1 and it never does: set algorithm.proximal to recompute, or "
            "rollout.max_staleness to a number",
        )


CHECKS = (check_preset, check_adaptive)
