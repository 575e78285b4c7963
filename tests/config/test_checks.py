"""Cross-checks: each refuses what it should, names key, value and fix, and leaves what is right alone."""

from __future__ import annotations

import pytest

from asyncrl.config.checks import advice, check_config
from asyncrl.config.facts import DataFacts, Facts, ModelFacts
from asyncrl.config.load import load_mapping
from asyncrl.config.plan import make_plan
from asyncrl.errors import Problem
from tests.config.samples import MINIMAL

FACTS = Facts(
    model=ModelFacts(context_tokens=256, parameters=1_000_000, layers=2, kv_heads=2, head_dim=16, vocabulary=64),
    train=DataFacts(800),
    eval=DataFacts(200),
    cores=4,
    memory_bytes=16 * 10**9,
    addresses=("192.0.2.7", "127.0.0.1"),
)


def found(*overrides: str, facts: Facts = FACTS) -> list[Problem]:
    return check_config(load_mapping(MINIMAL, overrides).config, facts)


def test_a_plain_pipeline_has_no_problem() -> None:
    assert found() == []


def test_the_queue_message_says_rule_value_and_fix() -> None:
    (problem,) = found("queue.capacity=16", "training.groups_per_step=32")
    assert problem.message == (
        "queue.capacity is 16, but a step needs 32 groups (training.groups_per_step): raise queue.capacity to at least 64"
    )


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["queue.capacity=31"], "queue.capacity", "to at least 32"),
        (["rollout.group_size=1", "reward.min_scored=1"], "rollout.group_size", "grpo compares"),
        (
            ["rollout.group_size=1", "reward.min_scored=1", "algorithm.advantage=reinforce_pp"],
            "training.filter",
            "set training.filter to keep",
        ),
        (["rollout.group_size=1", "reward.min_scored=1", "algorithm.advantage=rloo"], "rollout.group_size", "rloo compares"),
        (
            ["rollout.group_size=1", "algorithm.advantage=reinforce_pp", "training.filter=keep"],
            "reward.min_scored",
            "to at most 1",
        ),
        (["rollout.max_response_tokens=300"], "rollout.max_response_tokens", "the context of builtin/arithmetic is 256 tokens"),
        (["rollout.max_prompt_tokens=300"], "rollout.max_prompt_tokens", "lower their sum to 256"),
        (["inference.context_tokens=20"], "inference.context_tokens", "to at least 24"),
        (["inference.context_tokens=512"], "inference.context_tokens", "lower it to 256"),
        (["rollout.max_staleness=0", "training.publish_every=2"], "training.publish_every", "set training.publish_every to 1"),
        (["rollout.max_staleness=0", "training.mini_batches=2"], "training.mini_batches", "on-policy"),
        (["rollout.max_staleness=0", "training.epochs_per_batch=2"], "training.epochs_per_batch", "on-policy"),
        (["training.groups_per_step=1", "training.ranks=2"], "training.groups_per_step", "fewer than the 2 ranks"),
        (["training.groups_per_step=2", "training.mini_batches=4"], "training.groups_per_step", "fewer than the 4 mini-batches"),
        (["training.publish_every=31"], "training.publish_every", "lower training.publish_every to at most 30"),
        (["training.warmup_steps=31"], "training.warmup_steps", "to at most 30"),
        (["training.microbatch_tokens=16"], "training.microbatch_tokens", "24 tokens"),
        (["reward.min_scored=9"], "reward.min_scored", "to at most 8"),
        (["reward.functions=[{function: numeric, weight: 0}]"], "reward.functions", "give one a weight"),
        (["reward.functions=[{function: numeric}, {function: numeric}]"], "reward.functions.1.function", "twice"),
        (["algorithm.proximal=behave"], "algorithm.correction", "set algorithm.correction to none"),
        (["queue.capacity_megabytes=0.001"], "queue.capacity_megabytes", "could never be sent"),
        (["rollout.agent=my_agent"], "rollout.agent", "pkg.mod:fn"),
        (["eval.every=10"], "eval", "leave eval out"),
        (["eval.every=0", "eval.samples=9"], "eval", "give held-out prompts as data.eval"),
        (["tracking.mlflow.uri=somewhere"], "tracking.mlflow.uri", "sqlite:///file.db"),
        (["tracking.mlflow.uri=sqlite://x.db"], "tracking.mlflow.uri", "sqlite:///file.db"),
        (["cluster.ray_address=ray://head:10001"], "cluster.ray_address", "host:port"),
        (["cluster.ray_address=head"], "cluster.ray_address", "host:port"),
        (["cluster.ray_address=head:70000"], "cluster.ray_address", "host:port"),
        (["cluster.bind_address=localhost"], "cluster.bind_address", "no IPv4 address: write 127.0.0.1"),
        (["cluster.bind_address='::'"], "cluster.bind_address", "or 0.0.0.0 where several hosts take part"),
        (["cluster.bind_address=198.51.100.9"], "cluster.bind_address", "write one that it has (192.0.2.7, 127.0.0.1)"),
    ],
)
def test_what_would_hang_or_mislead_is_refused(overrides: list[str], key: str, words: str) -> None:
    (problem,) = found(*overrides)
    assert problem.key == key
    assert key.split(".")[0] in problem.message
    assert words in problem.message
    assert "{" not in problem.message


@pytest.mark.parametrize(
    "overrides",
    [
        ["queue.capacity=32"],
        ["rollout.group_size=1", "algorithm.advantage=reinforce_pp", "reward.min_scored=1", "training.filter=keep"],
        ["rollout.max_staleness=0"],
        ["rollout.max_concurrent=1"],
        ["rollout.max_response_tokens=240"],
        ["algorithm.proximal=behave", "algorithm.correction=none"],
        ["training.filter=refill", "training.max_refill_factor=2"],
        ["training.schedule=cosine", "training.final_learning_rate_factor=0.1", "training.warmup_steps=30"],
        ["data.eval=null"],
        ["data.eval=null", "eval.every=0"],
        ["eval.every=0"],
        ["data.eval=builtin/arithmetic", "eval.every=10"],
        ["tracking.mlflow=null"],
        ["tracking.mlflow.uri=http://tracker:5000"],
        ["tracking.mlflow.uri=postgresql+psycopg://tracker/db"],
        ["cluster.ray_address=head:6379"],
        ["cluster.ray_address=auto"],
        ["cluster.bind_address=0.0.0.0"],
        ["cluster.bind_address=192.0.2.7"],
        ["training.publish_every=30"],
    ],
)
def test_what_is_unusual_and_works_is_allowed(overrides: list[str]) -> None:
    assert found(*overrides) == []


def test_without_facts_only_the_file_is_judged() -> None:
    assert found("rollout.max_response_tokens=300", facts=Facts()) == []


def test_data_without_rows_is_refused() -> None:
    (problem,) = found(facts=Facts(train=DataFacts(0)))
    assert problem.key == "data.train"


def test_advice_names_steps_that_are_never_published_and_data_that_ends_early() -> None:
    config = load_mapping(
        MINIMAL, ["training.publish_every=4", "data.epochs=1", "training.steps=90", "rollout.max_concurrent=4"]
    ).config
    said = "\n".join(advice(config, FACTS))
    assert "the last 2 of 90 steps" in said
    assert "the data ends before 90 steps" in said
    assert "less than one group of 8" in said


def test_advice_names_an_evaluation_on_the_training_data() -> None:
    same = load_mapping(MINIMAL, ["data.train=rows.jsonl", "data.eval=rows.jsonl"]).config
    assert any("data.eval is data.train" in note for note in advice(same, FACTS))
    built_in = load_mapping(MINIMAL, ["data.eval=builtin/arithmetic"]).config  # its two halves do not overlap
    assert advice(built_in, FACTS) == []


def test_the_plan_names_the_processes_of_status_in_its_order() -> None:
    from asyncrl.services.supervisor.runtime import rows_of

    config = load_mapping(MINIMAL, ["training.ranks=2", "inference.servers=2", "reward.workers=3"]).config
    assert [process.name for process in make_plan(config, FACTS).processes] == [row.name for row in rows_of(config)]


def test_the_plan_grows_with_the_model_and_says_when_memory_is_short() -> None:
    config = load_mapping(MINIMAL).config
    small = make_plan(config, FACTS)
    large = make_plan(config, Facts(model=ModelFacts(parameters=2 * 10**9), memory_bytes=16 * 10**9, cores=4))
    assert small.memory_bytes is not None
    assert large.memory_bytes is not None
    assert large.memory_bytes > small.memory_bytes + 32 * 10**9
    assert any("memory" in note for note in large.notes)
    assert make_plan(config, Facts()).memory_bytes is None


@pytest.mark.parametrize(("gpus", "devices"), [(0, ["cpu", "cpu"]), (1, ["cpu", "cpu"]), (2, ["cuda:0", "cuda:1"])])
def test_the_plan_gives_every_rank_and_server_a_gpu_or_none(gpus: int, devices: list[str]) -> None:
    plan = make_plan(load_mapping(MINIMAL).config, Facts(gpus=gpus))
    assert [process.device for process in plan.processes if process.name in ("trainer/0", "inference/0")] == devices
