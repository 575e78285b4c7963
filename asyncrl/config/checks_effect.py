"""Options that would have no effect: what a file says happens, or is refused with what keeps it from happening. Pure.

A default is no demand: it may stand where it has nothing to do, as in a resolved config.yaml. Any other value of a key in
`EFFECTS` is refused where its part never acts. `CHECKS` holds what takes more than one key's condition to say.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.config.entries import Entry
from asyncrl.config.facts import Facts
from asyncrl.config.schema import Config
from asyncrl.config.walk import nearest, node
from asyncrl.errors import Problem

EVAL_METRICS = tuple(
    f"eval/{name}" for name in ("score", "samples", "failed", "version_min", "version_max", "response_tokens_mean", "seconds")
)
STEP_METRICS = (
    "reward", "response", "trajectories", "staleness", "groups", "loss", "policy", "correction", "grad", "updates", "tokens",
    "time", "idle", "sync", "checkpoint", "learning_rate", "critic", "drop_bias", "advantage",
    "greedy", "teacher", "kl",
)  # fmt: skip
"""What stands before the slash in the names of a step's metrics; what follows is the reward functions' own in part."""


@dataclass(frozen=True)
class Effect:
    """The keys that act only where `acts` holds; elsewhere `because` says why not, and `fix` what would let them."""

    keys: tuple[str, ...]
    acts: Callable[[Config, Facts], bool]
    because: str
    fix: str


EFFECTS: tuple[Effect, ...] = (
    Effect(
        ("rollout.staleness_floor", "rollout.staleness_ceiling"),
        lambda config, facts: config.rollout.max_staleness == "auto",
        "rollout.max_staleness is a number, so that the bound is not adapted",
        "set rollout.max_staleness to auto",
    ),
    Effect(
        ("rollout.quarantine_after",),
        lambda config, facts: config.data.epochs is None or config.rollout.quarantine_after <= config.data.epochs,
        "data.epochs visits each prompt fewer times than that, so none can fail so often",
        "raise data.epochs",
    ),
    Effect(
        ("reward.concurrency",),
        lambda config, facts: facts.async_rewards is not False,
        "no function of reward.functions is async, and sync ones run one at a time",
        "write one as `async def`, or raise reward.workers",
    ),
    Effect(
        (
            "inference.python",
            "inference.launcher",
            "inference.attach",
            "inference.tensor_parallel",
            "inference.memory_fraction",
            "inference.arguments",
        ),
        lambda config, facts: config.inference.engine == "sglang",
        "inference.engine is embedded, which is a process of asyncrl's own",
        "set inference.engine to sglang",
    ),
    Effect(
        ("inference.batch_invariant",),
        lambda config, facts: config.inference.engine == "embedded",
        "inference.engine sglang decides by its own arguments what depends on what else is served",
        "set inference.arguments to {enable-deterministic-inference: true}",
    ),
    Effect(
        (
            "inference.python",
            "inference.launcher",
            "inference.tensor_parallel",
            "inference.memory_fraction",
            "inference.arguments",
            "inference.max_batch",
            "inference.context_tokens",
        ),
        lambda config, facts: not config.inference.attach,
        "the servers of inference.attach were started by somebody else, with arguments of their own",
        "leave inference.attach out",
    ),
    Effect(
        (
            "algorithm.critic.learning_rate",
            "algorithm.critic.warmup_steps",
            "algorithm.critic.value_clip",
            "algorithm.critic.path",
        ),
        lambda config, facts: config.algorithm.advantage.needs.critic,
        "algorithm.advantage needs no critic",
        "set algorithm.advantage to gae",
    ),
    Effect(
        ("algorithm.teacher.path", "algorithm.teacher.url", "algorithm.teacher.timeout_seconds"),
        lambda config, facts: config.algorithm.advantage.needs.teacher,
        "algorithm.advantage needs no teacher",
        "set algorithm.advantage to distillation",
    ),
    Effect(
        ("algorithm.reference.path", "algorithm.reference.refresh_every"),
        lambda config, facts: config.algorithm.kl is not None,
        "algorithm.kl is null, so nothing is compared with a reference",
        "set algorithm.kl to k3",
    ),
    Effect(
        ("sync.verify_every",),
        lambda config, facts: config.sync.verify,
        "sync.verify is false, so nothing is compared",
        "set sync.verify to true",
    ),
    Effect(
        ("sync.folder",),
        lambda config, facts: config.sync.mode == "disk",
        "sync.mode writes no version to a disk",
        "set sync.mode to disk",
    ),
    Effect(
        ("sync.transport",),
        lambda config, facts: config.sync.mode == "staged",
        "sync.mode broadcast and disk have a transport of their own",
        "set sync.mode to staged",
    ),
    Effect(
        ("training.final_learning_rate_factor",),
        lambda config, facts: config.training.schedule != "constant",
        "training.schedule constant does not decay",
        "set training.schedule to linear or cosine",
    ),
    Effect(
        ("training.max_refill_factor",),
        lambda config, facts: config.training.filter == "refill",
        "training.filter does not refill",
        "set training.filter to refill",
    ),
    Effect(
        ("checkpoint.keep", "checkpoint.best", "checkpoint.timeout_seconds"),
        lambda config, facts: config.checkpoint.every > 0,
        "checkpoint.every is 0 (off), so there is nothing to keep",
        "set checkpoint.every to a number of steps",
    ),
    Effect(
        ("eval.every",),
        lambda config, facts: config.eval.every == 0 or _may_evaluate(config),
        "data.eval is null, so nothing is evaluated",
        "give held-out prompts as data.eval",
    ),
    Effect(
        ("eval.samples", "eval.temperature"),
        lambda config, facts: _may_evaluate(config),
        "data.eval is null, so nothing is evaluated",
        "give held-out prompts as data.eval",
    ),
)


def check_effects(config: Config, facts: Facts) -> Iterator[Problem]:
    """Values of `EFFECTS` that do nothing here."""
    for effect in EFFECTS:
        if effect.acts(config, facts):
            continue
        for key in effect.keys:
            value, default = _value(config, key), node(key).info.get_default(call_default_factory=True, validated_data={})
            if value != default:
                remedy = f"{effect.fix}, or leave {key} at its default, {_text(default)}"
                yield Problem(key, f"{key} is {_text(value)}, but {effect.because}: {remedy}")


def parameters_without_effect(config: Config) -> Iterator[str]:
    """What changes nothing in this run and is said, not refused: parameters of the algorithm's entries, since a loss is often
    written whole and how many updates it serves is set elsewhere; and the rule for stale tokens where a bound of 0 allows none,
    since who compares bounds changes the bound alone."""
    loss, correction, training = config.algorithm.loss, config.algorithm.correction, config.training
    if config.algorithm.proximal == "recompute" and training.mini_batches * training.epochs_per_batch == 1:
        written = [name for name in ("clip_low", "clip_high", "dual_clip") if name in _written(loss)]
        if written:
            yield (
                f"algorithm.loss.{written[0]} clips nothing: a step makes one update (training.mini_batches and epochs_per_batch "
                "are 1), and its ratio to the recomputed policy is 1"
            )
    if config.rollout.max_staleness == 0 and "decay" in _written(correction):
        yield "algorithm.correction.decay does nothing: with rollout.max_staleness 0 no token is stale"
    if config.algorithm.advantage.name == "gpg" and training.filter != "keep":
        yield (
            f"algorithm.advantage gpg scales nothing up: training.filter {training.filter} leaves only groups whose rewards "
            "differ, and its factor is 1"
        )
    if "denominator" in _written(correction) and not correction.needs.drops:
        yield f"algorithm.correction.denominator does nothing: {correction.name} drops no token"
    if config.rollout.max_staleness == 0 and config.rollout.on_stale != "mask":
        yield f"rollout.on_stale {config.rollout.on_stale} never acts: with rollout.max_staleness 0 no token is past the bound"


def check_filter(config: Config, facts: Facts) -> Iterator[Problem]:
    """What the filter would make of every group, or could not do to any."""
    training, needs = config.training, config.algorithm.advantage.needs
    size = config.members_per_group  # a greedy response is one more to differ from
    if size == 1 and training.filter != "keep" and not (needs.group or needs.teacher):
        yield Problem(
            "training.filter",
            f"training.filter is {training.filter}, but rollout.group_size is 1, so that rewards within a group are all equal "
            "and none would ever train: set training.filter to keep",
        )
    groups = training.groups_per_step
    if training.filter == "refill" and int(training.max_refill_factor * groups) <= groups:
        enough = math.ceil(100 * (groups + 1) / groups) / 100
        yield Problem(
            "training.max_refill_factor",
            f"training.max_refill_factor is {training.max_refill_factor:g}, so a step may look at {groups} groups, and it needs "
            f"them all: nothing could be refilled; raise it to at least {enough:g}, or set training.filter to drop",
        )


def check_best(config: Config, facts: Facts) -> Iterator[Problem]:
    """A best checkpoint that none can become."""
    best = config.checkpoint.best
    if best is None or not config.checkpoint.every:
        return
    if best.startswith("eval/"):
        yield from _best_evaluation(config, best)
        return
    family = best.partition("/")[0]
    if family not in STEP_METRICS:
        yield Problem(
            "checkpoint.best",
            f"checkpoint.best is {best!r}, which no step measures: name a metric as metrics.jsonl has it, such as reward/mean or "
            f"eval/score (the nearest kind is {nearest(family, (*STEP_METRICS, 'eval'))})",
        )


def _best_evaluation(config: Config, best: str) -> Iterator[Problem]:
    if best not in EVAL_METRICS and not best.startswith("eval/score/"):
        yield Problem(
            "checkpoint.best",
            f"checkpoint.best is {best!r}, which no evaluation measures: the nearest that one does is "
            f"{nearest(best, EVAL_METRICS)}",
        )
    elif config.data.eval is None:
        yield Problem(
            "checkpoint.best",
            f"checkpoint.best is {best}, but nothing is evaluated (data.eval is null): give held-out prompts as data.eval, or "
            "name a metric of training such as reward/mean",
        )
    elif config.eval.every == 0:
        yield Problem(
            "checkpoint.best",
            f"checkpoint.best is {best}, but eval.every is 0, so that no checkpoint before the last has a value of its own: set "
            "eval.every to a number of steps, or name a metric of training such as reward/mean",
        )


CHECKS = (check_filter, check_best, check_effects)


def _written(entry: Entry) -> set[str]:
    """The entry's parameters that are not at their default."""
    return {name for name, info in type(entry).model_fields.items() if getattr(entry, name) != info.default}


def _may_evaluate(config: Config) -> bool:
    """Not where data.eval says null; where it says nothing, `checks` has the word on the whole section."""
    return config.data.eval is not None or "eval" not in config.data.model_fields_set


def _value(config: Config, key: str) -> Any:
    return operator.attrgetter(key)(config)


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
