"""What a process needs to know to become any row of the run. It travels once, when the row's actor is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.schema import Config


@dataclass(frozen=True)
class UserObjects:
    """Python objects given to the Python API in place of names; empty for a run from YAML.

    rewards: position in `reward.functions` to callable; train, eval: rows, or a callable that yields them; agent: a callable.
    """

    rewards: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    train: Any = None
    eval: Any = None
    agent: Callable[..., Any] | None = None


@dataclass(frozen=True)
class RunSpec:
    """One launch of a run. `import_paths` go before the process's own, so that a user's modules are found where the launcher
    found them."""

    config: Mapping[str, Any]
    run_dir: str
    run_id: str
    import_paths: tuple[str, ...]
    objects: UserObjects = field(default_factory=UserObjects)

    def parsed_config(self) -> Config:
        return Config.model_validate(self.config)
