"""Presets, and the adaptive bound: what a file may say of staleness, and what it amounts to."""

from __future__ import annotations

import pytest

from asyncrl.config.checks import check_config
from asyncrl.config.explain import explain_key
from asyncrl.config.facts import Facts
from asyncrl.config.load import dump_config, load_config, load_mapping
from asyncrl.config.plan import make_plan
from asyncrl.config.presets import PRESETS
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, Problem
from tests.config.samples import MINIMAL


def config(*overrides: str) -> Config:
    return load_mapping(MINIMAL, overrides).config


def found(*overrides: str) -> list[Problem]:
    return check_config(config(*overrides), Facts())


def said_of_staleness(resolved: Config) -> tuple[object, ...]:
    rollout, training = resolved.rollout, resolved.training
    return rollout.max_staleness, rollout.on_stale, training.publish_every, training.mini_batches, training.epochs_per_batch


# ---- presets ---------------------------------------------------------------------------------------------------


def test_a_preset_sets_what_the_file_does_not_say() -> None:
    assert said_of_staleness(config("rollout.preset=on_policy")) == (0, "mask", 1, 1, 1)
    assert said_of_staleness(config("rollout.preset=one_step_off")) == (1, "wait", 1, 1, 1)
    assert said_of_staleness(config()) == (2, "mask", 1, 1, 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_passes_the_checks_and_so_does_a_file_that_says_all_of_it(preset: str) -> None:
    assert found(f"rollout.preset={preset}") == []
    assert found(f"rollout.preset={preset}", *(f"{key}={value}" for key, value in PRESETS[preset].items())) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_the_resolved_file_is_the_same_run(preset: str, tmp_path) -> None:
    resolved = config(f"rollout.preset={preset}")
    (tmp_path / "config.yaml").write_text(dump_config(resolved))
    again = load_config(tmp_path / "config.yaml").config
    assert again == resolved
    assert check_config(again, Facts()) == []


@pytest.mark.parametrize(("preset", "key"), [(preset, key) for preset, sets in PRESETS.items() for key in sets])
def test_a_key_that_contradicts_the_preset_is_refused_and_both_are_named(preset: str, key: str) -> None:
    other = {"rollout.max_staleness": 3, "rollout.on_stale": "reissue"}.get(key, 2)
    (problem,) = found(f"rollout.preset={preset}", f"{key}={other}")
    assert problem.key == key
    assert problem.message == (
        f"{key} is {other}, but rollout.preset {preset} sets it to {PRESETS[preset][key]}: leave {key} out, or set "
        "rollout.preset to null and each key by itself"
    )


def test_what_a_preset_leaves_open_stays_the_files() -> None:
    assert said_of_staleness(config("rollout.preset=one_step_off", "training.mini_batches=4")) == (1, "wait", 1, 4, 1)
    assert found("rollout.preset=one_step_off", "training.mini_batches=4") == []


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="the nearest known one is one_step_off"):
        config("rollout.preset=one_step_of")


# ---- the adaptive bound ----------------------------------------------------------------------------------------


def test_auto_has_a_floor_and_a_ceiling() -> None:
    assert found("rollout.max_staleness=auto", "rollout.staleness_floor=2", "rollout.staleness_ceiling=16") == []
    rollout = config("rollout.max_staleness=auto").rollout
    assert (rollout.staleness_floor, rollout.staleness_ceiling, rollout.staleness_limit) == (1, 8, 8)
    assert [rollout.staleness_bound(adapted) for adapted in (None, 0, 1, 5, 99)] == [1, 1, 1, 5, 8]


def test_a_fixed_bound_is_what_it_says_whatever_was_adapted_before() -> None:
    rollout = config("rollout.max_staleness=3").rollout
    assert rollout.staleness_limit == rollout.staleness_bound(None) == rollout.staleness_bound(7) == 3


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["rollout.staleness_floor=8"], "rollout.staleness_ceiling", "nothing to adapt: raise the ceiling above the floor"),
        (["rollout.staleness_floor=3", "rollout.staleness_ceiling=2"], "rollout.staleness_ceiling", "is 2 and"),
        (["algorithm.proximal=behave", "algorithm.correction=none"], "rollout.max_staleness", "every weight is 1"),
    ],
)
def test_a_bound_that_could_not_adapt_is_refused(overrides: list[str], key: str, words: str) -> None:
    (problem,) = found("rollout.max_staleness=auto", *overrides)
    assert problem.key == key
    assert words in problem.message


@pytest.mark.parametrize("key", ["rollout.staleness_floor", "rollout.staleness_ceiling"])
def test_floor_and_ceiling_do_nothing_for_a_fixed_bound_and_are_refused(key: str) -> None:
    (problem,) = found(f"{key}=4")
    assert problem.key == key
    assert "set rollout.max_staleness to auto" in problem.message


@pytest.mark.parametrize("value", ["automatic", "-1", "1.5", "true", "null", "[1]", "Auto"])
def test_what_is_neither_a_number_nor_auto_is_one_problem_that_names_both(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(f"rollout.max_staleness={value}")
    (problem,) = caught.value.problems
    assert problem.key == "rollout.max_staleness"
    assert "must be a whole number, at least 0 or auto" in problem.message


def test_a_bound_too_large_to_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="no run counts that far"):
        config("rollout.max_staleness=100000000000000000000")


def test_the_bound_is_explained_and_planned() -> None:
    explained = explain_key("rollout.max_staleness")
    assert (explained.takes, explained.default, explained.choices) == ("a whole number, at least 0 or auto", "2", ())
    assert dict(explain_key("rollout.preset").choices).keys() == PRESETS.keys()
    plan = make_plan(config("rollout.max_staleness=auto", "training.publish_every=2"), Facts())
    assert plan.staleness == "auto, 1 to 8 versions, a new one every 2 steps, on_stale mask"
    assert plan.sizes["live_groups"] == (8 + 1) * 2 * 16
    assert make_plan(config("rollout.preset=on_policy"), Facts()).staleness == "on-policy, preset on_policy"
