"""What corrections and diagnostics cost: the engine's step against a bare one, CPU time, on a model of about 5 M parameters.

The bare step does what no training can do without: the same batch cut into the same micro-batches, log-probs, the PPO loss,
backward, clipping, AdamW. It has no correction, no entropy, no sums by staleness, no figures, no health line. Where the engine
evaluates the proximal policy in a forward pass of its own, the bare step makes that pass too. Steps of both take turns.

    default        staleness_tis, one update: the proximal policy is the current one, no pass of its own
    two_updates    staleness_tis, two mini-batches: one pass before them
    judged_first   geo_mis_token_tis, which judges the whole mini-batch before its first update

Limit: what the engine's step takes beyond the other is at most 5 % of a bare step without that pass.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from asyncrl.algorithms.losses import LossInputs, token_loss
from asyncrl.algorithms.reports import too_much_dropped
from asyncrl.config.load import load_mapping
from asyncrl.config.schema import Config
from asyncrl.engines.fsdp import FsdpLauncher, head, model
from asyncrl.engines.fsdp.engine import FsdpEngine
from asyncrl.engines.fsdp.sharding import clipped_norm
from asyncrl.engines.fsdp.update import view
from asyncrl.messages import GroupId, ScoredGroup
from asyncrl.protocols import StepOutcome, TrainBatch
from asyncrl.scheduling.minibatches import cut_minibatches
from asyncrl.services.trainer.figures import Measure, StepsOfAge, drop_bias, staleness_metrics, trained_tokens
from asyncrl.services.trainer.health import Health
from tests.models import tiny_model

LIMIT = 1.05
HIDDEN, LAYERS, VOCABULARY = 256, 5, 4096
GROUPS, MEMBERS, PROMPT_TOKENS, LONGEST = 4, 8, 8, 64
VERSION, BOUND = 6, 4
CASES: dict[str, tuple[Any, int]] = {
    "default": ("staleness_tis", 1),
    "two_updates": ("staleness_tis", 2),
    "judged_first": ({"name": "geo_mis_token_tis", "low": 0.5, "high": 2.0}, 1),
}
"""Correction and mini-batches."""


@dataclass(frozen=True)
class Case:
    engine: FsdpEngine
    batch: TrainBatch
    health: Health
    has_a_pass_of_its_own: bool


def settings(correction: Any, mini_batches: int) -> Config:
    return load_mapping(
        {
            "model": {"path": "random"},
            "data": {"train": "none.jsonl"},
            "reward": {"functions": [{"function": "exact_match"}]},
            "rollout": {"max_staleness": BOUND, "group_size": MEMBERS, "max_response_tokens": LONGEST},
            "algorithm": {"correction": correction},
            "training": {"steps": 10, "groups_per_step": GROUPS, "mini_batches": mini_batches, "microbatch_tokens": 1024},
        }
    ).config


def random_group(number: int) -> ScoredGroup:
    """Responses of 8 to 64 tokens, each begun under one version and ended under the next."""
    random = np.random.default_rng(number)
    lengths = random.integers(8, LONGEST + 1, MEMBERS).astype(np.int32)
    total = int(lengths.sum())
    first = np.repeat(random.integers(VERSION - BOUND, VERSION, MEMBERS), lengths)
    later = np.concatenate([np.arange(length) >= length // 2 for length in lengths])
    return ScoredGroup(
        id=GroupId(0, number, 0),
        group_size=MEMBERS,
        start_version=VERSION - BOUND,
        prompt_tokens=random.integers(2, VOCABULARY, PROMPT_TOKENS).astype(np.int32),
        members=np.arange(MEMBERS, dtype=np.int32),
        lengths=lengths,
        response_tokens=random.integers(2, VOCABULARY, total).astype(np.int32),
        loss_mask=np.ones(total, bool),
        log_probs=np.zeros(total, np.float32),
        versions=(first + later).astype(np.int32),
        rewards=(np.arange(MEMBERS) % 2).astype(np.float32),
        components={},
        finish_reasons=["stop"] * MEMBERS,
        failures=[None] * MEMBERS,
        prompt="p",
        responses=["r"] * MEMBERS,
    )


def sampled_nearby(engine: FsdpEngine, batch: TrainBatch) -> TrainBatch:
    """The batch with log-probs of policies not far from the engine's, as stale servers would say them."""
    random, rows = np.random.default_rng(0), iter(engine.log_probs(batch).numpy())
    groups = []
    for group in batch.groups:
        own = np.concatenate([next(rows)[:length] for length in group.lengths])
        groups.append(replace(group, log_probs=(own + 0.1 * random.normal(size=len(own))).astype(np.float32)))
    return replace(batch, groups=tuple(groups))


def make_case(folder: Path, correction: Any, mini_batches: int) -> Case:
    launcher = FsdpLauncher(settings(correction, mini_batches), model_path=folder, rank=0)
    launcher.prepare()
    engine = launcher.join("")
    groups = tuple(random_group(number) for number in range(GROUPS))
    batch = TrainBatch(1, VERSION, 1e-8, groups, cut_minibatches(GROUPS, mini_batches), 1)
    return Case(engine, sampled_nearby(engine, batch), Health(), mini_batches > 1 or isinstance(correction, dict))


def whole_step(case: Case) -> StepOutcome:
    """The engine's step, and what the trainer makes of it for metrics.jsonl and the health lines."""
    outcome, groups = case.engine.train(case.batch), case.batch.groups
    tokens, measure = trained_tokens(groups, VERSION), Measure.of(groups)
    told = {**staleness_metrics(tokens, StepsOfAge.at(VERSION, 1)), **drop_bias(measure, Measure()), **outcome.metrics}
    case.health.judge(1, told)
    return outcome


def bare_step(case: Case, *, proximal_pass: bool) -> None:
    engine = case.engine
    work, plans = engine._prepare(case.batch)
    if proximal_pass:
        engine._recompute_proximal(work, plans)
    for plan in plans:
        for micro_batch in plan.micro_batches:
            micro = view(work, micro_batch, engine._device)
            inputs, zeros_bt = micro.inputs, torch.zeros(micro.mask_bt.shape)
            log_probs_N, *_ = engine._policy(inputs.input_ids, inputs.rows_N, inputs.columns_N, inputs.targets_N)
            log_probs_bt = zeros_bt.masked_scatter(micro.mask_bt, log_probs_N)
            proximal_bt = log_probs_bt.detach() if work.proximal_BT is None else micro.rows(work.proximal_BT)
            known = (log_probs_bt, proximal_bt, micro.rows(work.behaviour_BT), micro.rows(work.advantages_BT))
            losses = token_loss(engine._algorithm.loss, LossInputs(*known, torch.ones_like(log_probs_bt), micro.mask_bt))
            (losses.values_BT * plan.coefficients_B[micro.index, None]).sum().backward()
        clipped_norm(engine._parameters, 1.0)
        engine._optimizer.step()
        engine._optimizer.zero_grad(set_to_none=True)


class HeadWithoutEntropy(torch.autograd.Function):
    """The engine's head, but for what only figures need."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk: int) -> torch.Tensor:
        normalisers = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_probs = torch.empty_like(normalisers)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = head._logits(hidden[part], weight, bias, temperature)
            normalisers[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(1, targets[part, None])[:, 0] - normalisers[part]
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers)
        ctx.temperature, ctx.chunk = temperature, chunk
        return log_probs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, normalisers = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            scale = gradients[0][part, None] / ctx.temperature
            logits = head._logits(hidden[part], weight, bias, ctx.temperature)
            grad = (logits - normalisers[part, None]).exp_().mul_(-scale)
            grad.scatter_add_(1, targets[part, None], scale)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight, None, None, None, None


def log_probs_alone(hidden: Any, weight: Any, bias: Any, targets: Any, *, temperature: float, **_: Any) -> Any:
    """In place of `head.token_log_probs`, for a head without a bias."""
    assert bias is None
    chunk = max(1, head.CHUNK_ELEMENTS // weight.shape[0])
    log_probs = HeadWithoutEntropy.apply(hidden, weight, bias, targets, temperature, chunk)
    return log_probs, log_probs.detach()[:0], log_probs.detach()[:0]


def cpu_seconds(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Medians over rounds in which all take turns, in CPU seconds: the engine's step, the same without what is measured, a bare
    one, and `beyond`, the difference of the first two within a round."""

    def bare(proximal_pass: bool) -> Callable[[], None]:
        def step() -> None:
            with patch.object(model, "token_log_probs", log_probs_alone):
                bare_step(case, proximal_pass=proximal_pass)

        return step

    steps = {"ours": lambda: whole_step(case), "without": bare(case.has_a_pass_of_its_own), "bare": bare(False)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for round_ in range(rounds + 1):
        for name in order[round_ % 3 :] + order[: round_ % 3]:
            seconds[name].append(cpu_seconds(steps[name]))
    seconds["beyond"] = [ours - without for ours, without in zip(seconds["ours"], seconds["without"], strict=True)]
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def check_case(case: Case) -> None:
    """The step trains what it should: else a cheap one would be measured."""
    outcome = whole_step(case)
    assert outcome.updates == len(case.batch.mini_batches), outcome
    assert too_much_dropped(outcome.metrics) is None, outcome.metrics
    assert outcome.metrics["policy/entropy"] > 0
    assert f"correction/staleness_{BOUND}/weight_mean" in outcome.metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_model(Path(scratch), hidden=HIDDEN, layers=LAYERS, vocab=VOCABULARY, tie=True)
        for name, (correction, mini_batches) in CASES.items():
            case = make_case(folder, correction, mini_batches)
            parameters = sum(parameter.numel() for _, parameter in case.engine.named_parameters())
            check_case(case)
            found[name] = measure(case, rounds)
            case.engine.close()
    ratios = {name: 1 + seconds["beyond"] / seconds["bare"] for name, seconds in found.items()}
    checks = [{"name": name, "value": round(ratio, 4), "limit": LIMIT, "ok": ratio <= LIMIT} for name, ratio in ratios.items()]
    report = {
        "name": "corrections",
        "ratio": round(ratios["default"], 4),
        "ours": round(found["default"]["ours"], 4),
        "baseline": round(found["default"]["bare"], 4),
        "limit": LIMIT,
        "ok": all(check["ok"] for check in checks),
        "checks": checks,
        "parameters": parameters,
        "cpu_seconds": {name: {key: round(value, 4) for key, value in seconds.items()} for name, seconds in found.items()},
    }
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
