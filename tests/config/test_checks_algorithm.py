"""Combinations of advantage, loss, correction and proximal policy that cannot work are refused; all others pass."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.checks import advice, check_config
from asyncrl.config.entries import Advantage, Correction, Loss, entries_of
from asyncrl.config.facts import Facts
from asyncrl.config.load import load_mapping
from asyncrl.config.schema import Config
from asyncrl.errors import Problem
from tests.config.samples import MINIMAL

DROPPING = ("seq_mis", "geo_mis", "geo_mis_token_tis", "geo_mis_seq_tis", "k3_mask", "k3_mask_token_tis", "k3_mask_seq_tis")
VETOED = {"name": "token_tis", "veto": 1e-4}
BEHAVIOUR = ("dppo_tv", "dppo_kl", "dro", "topr", "m2po")
NEED_MORE = ("gdpo", "distillation")


def entry(name: str) -> Any:
    return {"name": "dro", "beta": 0.1} if name == "dro" else name


def found(group_size: int = 8, functions: int = 1, filter: str = "keep", **algorithm: Any) -> list[Problem]:
    """Problems of a file with these algorithms, whether or not their part of the engine is built."""
    names = ("exact_match", "numeric")[:functions]
    values = {
        **MINIMAL,
        "algorithm": algorithm,
        "rollout": {**MINIMAL["rollout"], "group_size": group_size},
        "reward": {"functions": [{"function": name} for name in names], "min_scored": 1},
        "training": {"steps": 30, "filter": filter},
    }
    return check_config(Config.model_validate(values), Facts())


def refused(key: str, words: str, **options: Any) -> None:
    (problem,) = found(**options)
    assert problem.key == key
    assert words in problem.message
    assert "{" not in problem.message


@pytest.mark.parametrize("name", [name for name, cls in entries_of(Advantage).items() if cls.requires.group])
def test_a_group_estimator_needs_more_than_one_response(name: str) -> None:
    refused("rollout.group_size", f"but {name} compares", group_size=1, functions=2, advantage=name)


@pytest.mark.parametrize("name", ["reinforce_pp", "remax"])
def test_an_estimator_without_groups_needs_none(name: str) -> None:
    assert found(group_size=1, advantage=name) == []


def test_one_response_differs_from_nothing_but_a_greedy_one() -> None:
    assert found(group_size=1, filter="drop", advantage="remax") == []
    refused("training.filter", "rollout.group_size is 1", group_size=1, filter="drop", advantage="reinforce_pp")


TEACHER = {"path": "builtin/arithmetic"}


@pytest.mark.parametrize(("teacher", "words"), [({}, "names none"), ({**TEACHER, "url": "http://127.0.0.1:1"}, "both")])
def test_distillation_needs_one_teacher(teacher: Any, words: str) -> None:
    refused("algorithm.teacher", words, advantage="distillation", teacher=teacher)


def test_distillation_needs_no_group_and_no_rewards_that_differ() -> None:
    assert found(group_size=1, filter="drop", advantage="distillation", teacher=TEACHER) == []


def test_a_teacher_without_distillation_does_nothing() -> None:
    refused("algorithm.teacher.path", "needs no teacher", teacher=TEACHER)


def test_gdpo_needs_several_rewards_and_groups_of_equal_totals() -> None:
    refused("algorithm.advantage", "reward.functions names one", advantage="gdpo")
    refused("training.filter", "may differ where the totals are equal", functions=2, filter="drop", advantage="gdpo")
    assert found(functions=2, advantage="gdpo") == []


@pytest.mark.parametrize("proximal", ["behave", "loglinear"])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_token_baseline_needs_the_proximal_policy_beforehand(name: str, proximal: str) -> None:
    refused("algorithm.advantage", "set algorithm.proximal to recompute", advantage=name, proximal=proximal, correction="none")


@pytest.mark.parametrize("advantage", ["gae", "optimal_token_baseline", {"name": "reinforce_pp", "gamma": 0.9}])
def test_gmpo_takes_no_advantage_per_token(advantage: Any) -> None:
    problems = found(advantage=advantage, loss="gmpo")
    assert [problem for problem in problems if "algorithm.loss is gmpo, which takes one advantage" in problem.message]


def test_gmpo_takes_an_advantage_that_is_the_same_on_every_token() -> None:
    assert found(advantage="reinforce_pp", loss="gmpo") == []


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_loss_that_judges_the_mini_batch_cannot_wait_for_loglinear(name: str) -> None:
    refused("algorithm.loss", "set algorithm.proximal to recompute or behave", loss=name, proximal="loglinear")
    assert found(loss=name) == []


@pytest.mark.parametrize("proximal", ["behave", "loglinear"])
def test_m2po_needs_weights_to_judge_by(proximal: str) -> None:
    refused("algorithm.loss", "set algorithm.proximal to recompute", loss="m2po", proximal=proximal, correction="none")


@pytest.mark.parametrize("correction", [name for name in entries_of(Correction) if name != "none"])
@pytest.mark.parametrize("loss", BEHAVIOUR)
def test_a_ratio_against_the_behaviour_policy_takes_no_correction(loss: str, correction: str) -> None:
    refused("algorithm.correction", "set algorithm.correction to none", loss=entry(loss), correction=correction)
    assert found(loss=entry(loss), correction="none") == []


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("correction", [name for name in entries_of(Correction) if name != "none"])
def test_with_behave_no_correction_but_none_is_left(correction: str, loss: str) -> None:
    words = "set algorithm.correction to none, or algorithm.proximal to recompute"
    refused("algorithm.correction", words, loss=loss, correction=correction, proximal="behave")


@pytest.mark.parametrize("loss", ["reinforce", "gpg"])
@pytest.mark.parametrize("correction", [*DROPPING, "veto", VETOED, {"name": "general", "batch_normalize": True}])
def test_a_loss_without_a_ratio_takes_weights_only(loss: str, correction: Any) -> None:
    refused("algorithm.correction", "use a correction that weighs alone", loss=loss, correction=correction)


@pytest.mark.parametrize("correction", [*DROPPING, "veto", VETOED])
def test_what_drops_cannot_wait_for_loglinear(correction: Any) -> None:
    refused("algorithm.correction", "set algorithm.proximal to recompute", correction=correction, proximal="loglinear")


@pytest.mark.parametrize("loss", [name for name in entries_of(Loss) if name not in BEHAVIOUR])
@pytest.mark.parametrize("correction", ["none", "token_tis", "staleness_tis", "segment_tis", "seq_tis", "token_icepop"])
def test_every_other_loss_goes_with_every_weight(loss: str, correction: str) -> None:
    assert found(loss=loss, correction=correction) == []


@pytest.mark.parametrize("correction", [*DROPPING, "veto", "general"])
def test_a_loss_with_a_ratio_goes_with_what_drops(correction: str) -> None:
    assert found(correction=correction) == []


@pytest.mark.parametrize("advantage", [name for name in entries_of(Advantage) if name not in NEED_MORE])
def test_every_other_advantage_goes_with_the_defaults(advantage: str) -> None:
    assert found(advantage=advantage) == []


def test_a_user_s_functions_take_the_place_of_any_and_pass_the_checks() -> None:
    loaded = load_mapping(
        MINIMAL,
        [
            "algorithm.advantage={name: 'mine.py:advantage', scale: 2}",
            "algorithm.loss={name: 'pkg.mod:loss', aggregation: token_sum}",
            "algorithm.correction='pkg.mod:correction'",
        ],
    ).config
    assert check_config(loaded, Facts()) == []
    written = loaded.to_mapping()["algorithm"]
    assert written["advantage"]["scale"] == 2
    assert written["advantage"]["name"].startswith("/")
    assert written["advantage"]["name"].endswith("/mine.py:advantage")
    assert written["loss"] == {"name": "pkg.mod:loss", "aggregation": "token_sum"}
    assert load_mapping(loaded.to_mapping()).config == loaded


@pytest.mark.parametrize(("name", "said"), [("keep", False), ("drop", True)])
def test_gpg_without_the_groups_that_it_makes_up_for_is_said(name: str, said: bool) -> None:
    config = load_mapping(MINIMAL, ["algorithm.advantage=gpg", f"training.filter={name}"]).config
    assert any("gpg scales nothing up" in note for note in advice(config, Facts())) == said


def test_a_denominator_that_nothing_drops_from_is_said() -> None:
    config = Config.model_validate({**MINIMAL, "algorithm": {"correction": {"name": "token_tis", "denominator": "all"}}})
    assert any("algorithm.correction.denominator does nothing" in note for note in advice(config, Facts()))
