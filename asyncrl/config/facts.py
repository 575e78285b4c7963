"""What the cross-checks need to know beyond the file: the model's sizes, the data's rows, the machine.

`asyncrl.pipeline.preflight` gathers them; here are their shape, and the facts of built-in models (made on first use).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BUILTIN_PREFIX = "builtin/"


@dataclass(frozen=True)
class ModelFacts:
    """context_tokens: the model's own limit. The rest sizes memory; None where config.json does not say."""

    context_tokens: int | None = None
    parameters: int | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocabulary: int | None = None
    architecture: str | None = None


@dataclass(frozen=True)
class DataFacts:
    """Rows of a source whose number is known before it is read to its end; None for a stream."""

    rows: int | None = None


@dataclass(frozen=True)
class Facts:
    """Everything known before a launch. None: could not be learned, and checks that need it stay silent."""

    model: ModelFacts | None = None
    train: DataFacts | None = None
    eval: DataFacts | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    gpus: int = 0


BUILTIN_MODELS: Mapping[str, ModelFacts] = {
    "builtin/arithmetic": ModelFacts(
        context_tokens=128, parameters=107_072, layers=2, kv_heads=2, head_dim=16, vocabulary=64, architecture="Qwen2ForCausalLM"
    ),
}
"""The one place that says how long a built-in model's context is; the engines build the model from here."""
