"""Options without an effect: refused with what keeps them from acting and the fix; allowed where they act, and as a default."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.checks import advice, check_config
from asyncrl.config.checks_effect import EFFECTS, EVAL_METRICS, STEP_METRICS
from asyncrl.config.facts import Facts
from asyncrl.config.load import dump_config, load_config, load_mapping
from asyncrl.config.walk import node
from asyncrl.errors import Problem
from tests.config.samples import MINIMAL

SYNC, ASYNC = Facts(async_rewards=False), Facts(async_rewards=True)
HELD_OUT = "data.eval=builtin/arithmetic"
REFILL, SAVED = ("training.filter=refill",), ("checkpoint.every=5",)


def found(*overrides: str, facts: Facts = SYNC) -> list[Problem]:
    return check_config(load_mapping(MINIMAL, overrides).config, facts)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["data.epochs=2", "rollout.quarantine_after=4"], "rollout.quarantine_after", "raise data.epochs"),
        (["reward.concurrency=8"], "reward.concurrency", "write one as `async def`, or raise reward.workers"),
        (["training.final_learning_rate_factor=0.1"], "training.final_learning_rate_factor", "does not decay"),
        (["training.max_refill_factor=2"], "training.max_refill_factor", "set training.filter to refill"),
        ([*REFILL, "training.max_refill_factor=1"], "training.max_refill_factor", "to at least 1.07"),
        ([*REFILL, "training.max_refill_factor=1.06"], "training.max_refill_factor", "or set training.filter to drop"),
        (["checkpoint.keep=5"], "checkpoint.keep", "to a number of steps, or leave checkpoint.keep at its default, 2"),
        (["checkpoint.timeout_seconds=5"], "checkpoint.timeout_seconds", "at its default, 600"),
        (["checkpoint.best=reward/mean"], "checkpoint.best", "set checkpoint.every to a number of steps"),
        ([*SAVED, "checkpoint.best=eval/score"], "checkpoint.best", "give held-out prompts as data.eval"),
        ([*SAVED, HELD_OUT, "checkpoint.best=eval/score", "eval.every=0"], "checkpoint.best", "set eval.every to a number"),
        ([*SAVED, HELD_OUT, "checkpoint.best=eval/scores"], "checkpoint.best", "that one does is eval/score"),
        ([*SAVED, "checkpoint.best=rewards/mean"], "checkpoint.best", "the nearest kind is reward)"),
        (["data.eval=null", "eval.every=10"], "eval.every", "data.eval, or leave eval.every at its default, 50"),
        (["data.eval=null", "eval.samples=10"], "eval.samples", "nothing is evaluated"),
        (["data.eval=null", "eval.temperature=0"], "eval.temperature", "nothing is evaluated"),
    ],
)
def test_what_would_have_no_effect_is_refused(overrides: list[str], key: str, words: str) -> None:
    (problem,) = found(*overrides)
    assert problem.key == key
    assert problem.message.startswith(key)
    assert words in problem.message


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["rollout.max_staleness=0", "rollout.on_stale=wait"], SYNC),
        (["data.epochs=4", "rollout.quarantine_after=4"], SYNC),
        (["rollout.quarantine_after=9"], SYNC),
        (["data.epochs=1", "rollout.quarantine_after=1"], SYNC),
        (["reward.concurrency=8"], ASYNC),
        (["reward.concurrency=8"], Facts()),
        ([*REFILL, "training.max_refill_factor=1.07"], SYNC),
        ([*SAVED, "checkpoint.keep=5", "checkpoint.timeout_seconds=5", "checkpoint.best=reward/exact_match"], SYNC),
        ([*SAVED, HELD_OUT, "checkpoint.best=eval/score/gsm8k"], SYNC),
        ([HELD_OUT, "eval.every=0", "eval.samples=10", "eval.temperature=0"], SYNC),
    ],
)
def test_where_it_acts_it_is_allowed(overrides: list[str], facts: Facts) -> None:
    assert found(*overrides, facts=facts) == []


@pytest.mark.parametrize("key", [key for effect in EFFECTS for key in effect.keys])
def test_every_key_is_one_of_the_schema_with_a_default_that_is_no_demand(key: str) -> None:
    info = node(key).info
    assert not info.is_required()
    assert not hasattr(info.get_default(call_default_factory=True), "model_dump")


def test_a_resolved_file_passes_though_it_names_every_default(tmp_path: Path) -> None:
    config = load_mapping(MINIMAL, ["rollout.max_staleness=0", "data.epochs=1"]).config
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert check_config(load_config(tmp_path / "config.yaml").config, SYNC) == []


def test_every_metric_of_an_evaluation_and_of_a_steps_figures_may_choose_the_best() -> None:
    from asyncrl.services.rollouter.history import EvalRecord
    from asyncrl.services.trainer import figures

    record = EvalRecord("last", 1, 0.5, 1, 0, 0, 0, 1.0, 1.0)
    numbers = {f"eval/{name}" for name, value in vars(record).items() if isinstance(value, int | float) and name != "step"}
    assert numbers == set(EVAL_METRICS)
    tokens = figures.TrainedTokens(1, 1, (0, 0), 0, 0, (1,))
    assert {name.partition("/")[0] for name in figures.staleness_metrics(tokens, figures.StepsOfAge(1, 0))} <= set(STEP_METRICS)


def test_parameters_of_the_algorithm_that_change_nothing_are_said() -> None:
    def said(*overrides: str) -> str:
        return "\n".join(advice(load_mapping(MINIMAL, overrides).config, SYNC))

    assert "algorithm.loss.clip_high clips nothing" in said("algorithm.loss.clip_high=0.3")
    assert said("algorithm.loss.clip_high=0.28") == ""
    assert said("algorithm.loss.clip_high=0.3", "training.mini_batches=2") == ""
    assert said("algorithm.loss.clip_high=0.3", "algorithm.proximal=behave", "algorithm.correction=none") == ""
    assert "algorithm.correction.decay does nothing" in said("algorithm.correction.decay=0.3", "rollout.max_staleness=0")
    assert said("algorithm.correction.decay=0.3") == ""


def test_a_rule_for_stale_tokens_that_none_needs_is_said() -> None:
    def said(*overrides: str) -> str:
        return "\n".join(advice(load_mapping(MINIMAL, overrides).config, SYNC))

    assert "rollout.on_stale wait never acts" in said("rollout.max_staleness=0", "rollout.on_stale=wait")
    assert said("rollout.max_staleness=1", "rollout.on_stale=wait") == ""
