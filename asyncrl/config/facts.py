"""What the cross-checks need to know beyond the file: the model's sizes, the data's rows, the machine.

`asyncrl.pipeline.preflight` gathers them; here is only their shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """context_tokens: the model's own limit. attention_window: tokens that some layer looks back at most. other_state: layers
    whose state is no cache of keys and values. The rest sizes memory; None where config.json does not say."""

    context_tokens: int | None = None
    parameters: int | None = None
    layers: int | None = None
    hidden: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocabulary: int | None = None
    architecture: str | None = None
    attention_window: int | None = None
    other_state: str | None = None


@dataclass(frozen=True)
class DataFacts:
    """Rows of a source whose number is known before it is read to its end; None for a stream."""

    rows: int | None = None


@dataclass(frozen=True)
class Facts:
    """Everything known before a launch. None: could not be learned, and checks that need it stay silent. addresses: this
    machine's, `cluster.bind_address` among them where it is one. async_rewards: whether a function of `reward.functions` is
    async. teacher, reference: of algorithm.teacher.path and algorithm.reference.path, where they are given. unknown: sentences
    about what could not be learned, and is not refused for that."""

    model: ModelFacts | None = None
    train: DataFacts | None = None
    eval: DataFacts | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    gpus: int = 0
    addresses: tuple[str, ...] | None = None
    async_rewards: bool | None = None
    teacher: ModelFacts | None = None
    reference: ModelFacts | None = None
    unknown: tuple[str, ...] = ()
