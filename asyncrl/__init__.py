"""asyncrl: reinforcement learning for language models as a fully asynchronous streaming pipeline.

`Pipeline`, `launch` and `Run` load on first use, so that `import asyncrl` costs neither torch nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.pipeline import Pipeline, Run, launch

__version__ = "0.1.0"
__all__ = ["Pipeline", "Run", "__version__", "launch"]


def __getattr__(name: str) -> Any:
    if name in ("Pipeline", "Run", "launch"):
        from asyncrl import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
