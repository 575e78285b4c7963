"""The divergence from a reference: what cannot work or would not act is refused, what may surprise is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.changes import changes
from asyncrl.config.checks import advice, check_config
from asyncrl.config.explain import explain_key
from asyncrl.config.facts import Facts, ModelFacts
from asyncrl.config.load import load_mapping
from asyncrl.config.plan import make_plan
from asyncrl.errors import ConfigError, Problem
from tests.config.samples import MINIMAL

KL = "algorithm.kl=k3"
ADAPTIVE = "algorithm.kl.adaptive={target: 0.01}"
REWARD = ("algorithm.kl={name: k1, where: reward}", "training.filter=keep")
POLICY = ModelFacts(vocabulary=100, hidden=32, layers=2, context_tokens=64, parameters=10**9)


def found(*overrides: str, facts: Facts = Facts()) -> list[Problem]:  # noqa: B008 (frozen)
    return check_config(load_mapping(MINIMAL, overrides).config, facts)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([KL, "algorithm.kl.coefficient=0"], "algorithm.kl.coefficient", "or algorithm.kl to null"),
        (["algorithm.kl=k1", ADAPTIVE], "algorithm.kl.adaptive", "use k1+"),
        ([KL, "algorithm.kl.adaptive={target: 0.1, horizon: 100}"], "algorithm.kl.adaptive.horizon", "raise it to at least 128"),
        ([*REWARD, "algorithm.kl.name=k2+"], "algorithm.kl", "use k2, or set algorithm.kl.where to loss"),
        (["algorithm.kl={where: reward}"], "training.filter", "would remove groups whose rewards differ by it alone"),
        (["algorithm.kl={where: reward}", "training.filter=refill"], "training.filter", "set training.filter to keep"),
        (
            [*REWARD, "algorithm.advantage=reinforce_pp", "algorithm.loss=gmpo"],
            "algorithm.kl.where",
            "gmpo takes one per response",
        ),
        (
            [*REWARD, "algorithm.advantage=distillation", "algorithm.teacher.url=http://10.0.0.1:30000"],
            "algorithm.kl.where",
            "from the teacher, and the divergence would not reach it",
        ),
        ([KL, "algorithm.reference.refresh_every=30"], "algorithm.reference.refresh_every", "lower it to at most 29"),
        ([KL, "algorithm.reference.refresh_every=1", "training.publish_every=30"], "algorithm.reference.refresh_every", "to 0"),
        ([KL, "algorithm.reference.path=builtin/arithmetic"], "algorithm.reference.path", "made for the policy alone"),
        (["algorithm.reference.refresh_every=2"], "algorithm.reference.refresh_every", "algorithm.kl is null"),
        (["algorithm.reference.path=a/model"], "algorithm.reference.path", "set algorithm.kl to k3"),
    ],
)
def test_what_cannot_work_or_would_not_act_is_refused(overrides: list[str], key: str, words: str) -> None:
    (problem,) = found(*overrides)
    assert problem.key == key
    assert problem.message.startswith(key)
    assert words in problem.message


def test_gdpo_never_sees_the_total_that_it_would_be_taken_from() -> None:
    several = "reward.functions=[{function: exact_match}, {function: numeric}]"
    (problem,) = found(*REWARD, "algorithm.advantage=gdpo", several)
    assert problem.key == "algorithm.kl.where"
    assert found(KL, "algorithm.advantage=gdpo", several, "training.filter=keep") == []


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"])
def test_every_estimator_goes_in_the_loss_and_those_without_a_gradient_of_their_own_in_the_reward(name: str) -> None:
    assert found(f"algorithm.kl={name}") == []
    assert (found(*REWARD, f"algorithm.kl.name={name}") == []) == (not name.endswith("+"))


@pytest.mark.parametrize(
    "overrides",
    [
        [KL, ADAPTIVE, "algorithm.reference.refresh_every=29"],
        ["algorithm.kl=k1+", ADAPTIVE],
        [*REWARD, ADAPTIVE, "algorithm.advantage=gae"],
        [*REWARD, "algorithm.advantage=reinforce_pp"],
        [KL, "algorithm.advantage=reinforce_pp", "algorithm.loss=gmpo"],
        ["algorithm.entropy_coefficient=0.01"],
    ],
)
def test_where_it_acts_it_is_allowed(overrides: list[str]) -> None:
    assert found(*overrides) == []


@pytest.mark.parametrize(
    ("reference", "refresh", "words"),
    [
        ({"vocabulary": 99}, 0, "give a model with the policy's vocabulary"),
        ({"context_tokens": 23}, 0, "a sequence may have 24"),
        ({"hidden": 64}, 2, "give a model of the policy's own sizes"),
        ({"hidden": 64}, 0, None),
        ({"parameters": None}, 2, None),
    ],
)
def test_a_reference_is_one_that_the_policy_can_be_compared_with(reference: dict, refresh: int, words: str | None) -> None:
    facts = Facts(model=POLICY, reference=ModelFacts(**{**vars(POLICY), **reference}))
    problems = found(KL, "algorithm.reference.path=a/model", f"algorithm.reference.refresh_every={refresh}", facts=facts)
    assert [problem.key for problem in problems] == (["algorithm.reference.path"] if words else [])
    assert all(words in problem.message for problem in problems)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.kl=k1"], "k1 in the loss has an expected gradient of 0"),
        (REWARD, "scaled up to advantages of size 1"),
        ([KL], ""),
        ([*REWARD, "algorithm.advantage=rloo"], ""),
    ],
)
def test_what_may_surprise_is_said(overrides: list[str], words: str) -> None:
    notes = advice(load_mapping(MINIMAL, overrides).config, Facts())
    assert any(words in note for note in notes) if words else notes == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.kl=k4", "the nearest known one is k1 (there are k1, abs, k2, k3, k1+, abs+, k2+, k3+)"),
        ("algorithm.kl=3", "or a mapping with such a name and its parameters"),
        ("algorithm.kl={coeficient: 1}", "the nearest known one is algorithm.kl.coefficient"),
        ("algorithm.kl={adaptive: {horizon: 9}}", "algorithm.kl.adaptive.target is missing"),
        ("algorithm.kl={coefficient: -1}", "at least 0"),
        ("algorithm.entropy_coefficient=-0.1", "at least 0"),
        ("algorithm.reference.ranks=2", "algorithm.reference.ranks is not a known key"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_wanted(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_mapping(MINIMAL, [override])
    (problem,) = caught.value.problems
    assert words in problem.message
    assert "pkg.mod:fn" not in problem.message


def test_a_name_is_short_for_a_mapping_and_a_mapping_without_one_means_k3() -> None:
    by_name, by_mapping = (load_mapping(MINIMAL, [f"algorithm.kl={text}"]).config for text in ("k3", "{coefficient: 0.001}"))
    assert by_name == by_mapping
    assert load_mapping(by_name.to_mapping()).config == by_name
    assert load_mapping(MINIMAL).config.algorithm.kl is None
    assert load_mapping(MINIMAL, [KL, "algorithm.kl.coefficient=0.5"]).config.algorithm.kl.coefficient == 0.5  # type: ignore[union-attr]


def test_its_names_and_parameters_are_explained() -> None:
    explanation = explain_key("algorithm.kl")
    assert [name for name, _ in explanation.choices] == ["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
    assert dict(explanation.parts)["algorithm.kl.where"].endswith("statistics.")


def test_models_of_critic_and_reference_are_found_from_anywhere(tmp_path: Path) -> None:
    config = load_mapping(MINIMAL, [KL, "algorithm.reference.path=./ref", "algorithm.critic.path=./value"], cwd=tmp_path).config
    assert config.algorithm.reference.path == str(tmp_path / "ref")
    assert config.algorithm.critic.path == str(tmp_path / "value")


def test_a_run_that_goes_on_keeps_its_reference() -> None:
    before, now = (load_mapping(MINIMAL, [KL, f"algorithm.reference.refresh_every={every}"]).config for every in (2, 3))
    (change,) = changes(before, now)
    assert "it decides whether the checkpoint holds the reference" in str(change)


def test_the_plan_counts_a_reference_and_a_critic() -> None:
    def trainer(*overrides: str, **facts: ModelFacts) -> int:
        plan = make_plan(load_mapping(MINIMAL, overrides).config, Facts(model=POLICY, **facts))
        return next(process.memory_bytes or 0 for process in plan.processes if process.name == "trainer/0")

    alone, GB = trainer(), 10**9
    assert trainer(KL) - alone == 4 * GB
    assert trainer(KL, "training.ranks=2") - trainer("training.ranks=2") == 2 * GB
    assert trainer(KL, reference=ModelFacts(parameters=3 * GB)) - alone == 12 * GB
    assert trainer("algorithm.advantage=gae") - alone == 16 * GB
    saved = ("checkpoint.every=5",)
    assert trainer(KL, *saved) - trainer(*saved) == 4 * GB
    assert trainer(KL, "algorithm.reference.refresh_every=2", *saved) - trainer(*saved) == 8 * GB
