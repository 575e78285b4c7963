"""Small checkpoints, written as a trainer writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.checkpoint import CheckpointInfo, Checkpoints


def state_of(step: int, **changes: Any) -> dict[str, Any]:
    """A state.json but for its `format` and `files`."""
    return {
        "step": step,
        "version": step,
        "incarnation": 1,
        "world_size": 1,
        "wall_s": 1.5 * step,
        "config": {},
        "tally": {},
        "best": None,
        **changes,
    }


def save(checkpoints: Checkpoints, step: int, files: Mapping[str, bytes] | None = None) -> CheckpointInfo:
    """One complete checkpoint with these files."""
    folder = checkpoints.begin(step)
    for name, content in (files or {"__0_0.distcp": b"weights"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return checkpoints.commit(step, state_of(step))
