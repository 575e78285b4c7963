"""What the training engine's tests share: a tiny model, random groups, a configuration, engines of one rank and of two."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.messages import GreedyResponse, GroupId, ScoredGroup
from asyncrl.protocols import TrainBatch
from asyncrl.scheduling.minibatches import cut_minibatches

VOCAB = 40


def config(**sections: dict[str, Any]) -> Config:
    """A configuration with these sections laid over small defaults."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "tiny"},
        "data": {"train": "builtin/arithmetic"},
        "rollout": {"temperature": 0.7, "max_staleness": 3, "max_response_tokens": 12},
        "reward": {"functions": [{"function": "exact_match"}, {"function": "numeric", "weight": 0.5}]},
        "training": {"steps": 10, "learning_rate": 1e-2, "max_grad_norm": 1e9},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields}
    return Config.model_validate(base)


def group(row: int, *, seed: int = 0, size: int = 4, longest: int = 9) -> ScoredGroup:
    """Random tokens, lengths 0 … 9 and one of `longest`, versions 0 … 3, a few untrainable tokens, and now and then a member
    without a reward."""
    random = np.random.default_rng((seed, row))
    lengths = random.integers(0, 10, size).astype(np.int32)
    lengths[0], lengths[-1] = 5, lengths[-1] if longest == 9 else longest
    total = int(lengths.sum())
    rewards = random.random(size).astype(np.float32)
    rewards[1:][random.random(size - 1) < 0.2] = np.nan
    return ScoredGroup(
        id=GroupId(0, row, 0),
        group_size=size,
        start_version=0,
        prompt_tokens=random.integers(2, VOCAB, random.integers(1, 7)).astype(np.int32),
        members=np.arange(size, dtype=np.int32),
        lengths=lengths,
        response_tokens=random.integers(2, VOCAB, total).astype(np.int32),
        loss_mask=random.random(total) < 0.9,
        log_probs=(-4 + random.normal(scale=0.5, size=total)).astype(np.float32),
        versions=random.integers(0, 4, total).astype(np.int32),
        rewards=rewards,
        components={"exact_match": rewards, "numeric": random.random(size).astype(np.float32)},
        finish_reasons=["stop"] * size,
        failures=[None if np.isfinite(reward) else "reward raised" for reward in rewards],
        prompt="p",
        responses=["r"] * size,
        teacher_log_probs=(-4 + random.normal(scale=0.5, size=total)).astype(np.float32),
        greedy=GreedyResponse(float(np.float32(random.random())), 0, 3),
    )


def batch(groups: int = 6, *, mini_batches: int = 1, epochs: int = 1, learning_rate: float = 1e-2, seed: int = 0) -> TrainBatch:
    made = tuple(group(row, seed=seed) for row in range(groups))
    return TrainBatch(1, 3, learning_rate, made, cut_minibatches(groups, mini_batches), epochs)


def uneven_batch(engine: Any) -> TrainBatch:
    """Responses of 0 to 90 tokens, sampled as by policies near the engine's, some nearer than others."""
    made = [group(row, seed=5, longest=longest) for row, longest in enumerate((9, 90, 1, 40, 9, 9))]
    whole = TrainBatch(1, 3, 1e-2, tuple(made), cut_minibatches(len(made), 1), 1)
    own_BT, random = engine.log_probs(whole).numpy(), np.random.default_rng(11)
    rows = iter(own_BT)
    for index, each in enumerate(made):
        log_probs = np.concatenate([next(rows)[:length] for length in each.lengths])
        scale = np.repeat(random.choice([0.05, 0.4], len(each.lengths)), each.lengths)
        noisy = (log_probs + scale * random.normal(size=len(scale))).astype(np.float32)
        made[index] = replace(each, log_probs=noisy)
    return replace(whole, groups=tuple(made))


def distance(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Between two gradients, relative to the second: the L2 norm over all parameters."""
    apart = sum(float(((np.asarray(found[name]) - np.asarray(whole)) ** 2).sum()) for name, whole in expected.items())
    return math.sqrt(apart / sum(float((np.asarray(whole) ** 2).sum()) for whole in expected.values()))


def poisoned(whole: TrainBatch, index: int = 0) -> TrainBatch:
    """The batch with a NaN among the behaviour log-probs of one group's trainable tokens."""
    victim = whole.groups[index]
    log_probs = victim.log_probs.copy()
    log_probs[np.flatnonzero(victim.loss_mask)[0]] = np.nan
    groups = list(whole.groups)
    groups[index] = replace(victim, log_probs=log_probs)
    return replace(whole, groups=tuple(groups))


@contextlib.contextmanager
def engine_of_one_rank(model: Path, settings: Config, files: Any = None) -> Iterator[Any]:
    from asyncrl.engines.fsdp import FsdpLauncher

    launcher = FsdpLauncher(settings, model_path=model, rank=0, files=files)
    launcher.prepare()
    engine = launcher.join("")
    try:
        yield engine
    finally:
        engine.close()
