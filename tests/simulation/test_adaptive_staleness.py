"""`rollout.max_staleness: auto` and the presets in whole runs on the virtual clock."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from asyncrl.config.load import load_mapping
from asyncrl.protocols import StepOutcome
from asyncrl.simulation.simulate import World, simulate
from tests.services.rollouter_parts import make_config
from tests.simulation.test_simulate import HELD_OUT, PROMPTS, ROUGH, SLOW, assert_nothing_is_left, assert_the_bound_held, run

CEILING = 6
AUTO = {"max_staleness": "auto", "staleness_ceiling": CEILING}
ROOMY = {"max_concurrent": 256, **AUTO}
EVERY_GROUP = {"filter": "keep"}


def sound_by_staleness(loss):
    """A step whose effective sample size falls by `loss` for each version that its tokens are old."""

    def outcome(batch):
        ages = np.concatenate([batch.version - group.versions[group.loss_mask] for group in batch.groups])
        return StepOutcome(1, 0, {"correction/effective_sample_size": max(0.0, 1 - loss * float(ages.clip(0).mean()))})

    return outcome


SLOW_GENERATION = World(
    token_seconds=0.4, num_tokens=lambda request, member: 20, step_seconds=lambda batch: 1.0, outcome=sound_by_staleness(0.0)
)
"""An answer takes eight steps, and as many as are asked for are generated at once: running further ahead pays."""


def bounds_of(tmp_path):
    return [int(json.loads(line)["staleness/bound"]) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_where_the_trainer_starves_the_bound_widens_until_it_does_not(tmp_path):
    options = {"training": EVERY_GROUP, "world": SLOW_GENERATION, "steps": 100}
    _, adapted = run(tmp_path / "auto", rollout=ROOMY, **options)
    _, narrow = run(tmp_path / "narrow", rollout={"max_concurrent": 256, "max_staleness": 1}, **options)
    bounds = bounds_of(tmp_path / "auto")
    assert bounds[0] == 1
    assert bounds[-1] > 3
    assert all(0 <= later - earlier <= 1 for earlier, later in pairwise(bounds))
    assert adapted.seconds < 0.7 * narrow.seconds
    assert_the_bound_held(tmp_path / "auto", CEILING)
    assert_nothing_is_left(adapted)
    staleness = adapted.summary["trainer/0"]["staleness"]
    assert (staleness["bound"], staleness["bound_last"]) == (CEILING, bounds[-1])
    assert staleness["bound_mean"] == pytest.approx(sum(bounds) / len(bounds))


def test_where_older_tokens_teach_less_the_bound_stays_narrow(tmp_path):
    world = replace(SLOW_GENERATION, outcome=sound_by_staleness(0.08))
    run(tmp_path, rollout=ROOMY, training=EVERY_GROUP, world=world, steps=150)
    assert max(bounds_of(tmp_path)) <= 3 < CEILING


def test_when_the_tokens_turn_bad_the_bound_narrows_to_its_floor_and_nothing_is_thrown_away(tmp_path):
    good, bad = sound_by_staleness(0.0), sound_by_staleness(1.0)
    world = replace(SLOW_GENERATION, outcome=lambda batch: (good if batch.step <= 60 else bad)(batch))
    _, simulated = run(tmp_path, rollout=ROOMY, training=EVERY_GROUP, world=world, steps=200)
    bounds = bounds_of(tmp_path)
    assert max(bounds[:60]) > 3
    assert bounds[-1] == 1
    assert simulated.ledger.attempts.counts()["expired"] == 0


def test_where_training_is_the_slow_side_the_bound_stays_at_its_floor(tmp_path):
    world = replace(SLOW_GENERATION, token_seconds=0.01, step_seconds=lambda batch: 3.0)
    run(tmp_path, rollout=ROOMY, training=EVERY_GROUP, world=world, steps=60)
    assert set(bounds_of(tmp_path)) == {1}


@pytest.mark.parametrize("publish_every", [1, 3])
@pytest.mark.parametrize("on_stale", ["mask", "reissue", "wait"])
def test_in_a_rough_world_no_token_past_the_ceiling_trains_and_under_wait_nothing_expires(tmp_path, on_stale, publish_every):
    world = replace(ROUGH, outcome=sound_by_staleness(0.03))
    training = {"publish_every": publish_every}
    _, simulated = run(tmp_path, rollout={**AUTO, "on_stale": on_stale}, training=training, world=world, steps=200)
    assert len(set(bounds_of(tmp_path))) > 1
    assert_the_bound_held(tmp_path, CEILING)
    assert_nothing_is_left(simulated)
    if on_stale == "wait":
        assert simulated.ledger.attempts.counts()["expired"] == 0


def preset_of(name, tmp_path):
    """A whole run under a preset, all of it as the file resolves it."""
    base = make_config(
        rollout={"max_response_tokens": SLOW, "generation_retries": 0},
        training={"steps": 100, "groups_per_step": 2},
        evaluation={"samples": 4, "every": 40},
    ).to_mapping()
    for key in ("max_staleness", "on_stale"):
        del base["rollout"][key]
    for key in ("publish_every", "mini_batches", "epochs_per_batch"):
        del base["training"][key]
    config = load_mapping(base, [f"rollout.preset={name}"]).config
    return simulate(config, tmp_path, prompts=PROMPTS, eval_prompts=HELD_OUT, world=ROUGH)


def test_on_policy_every_token_is_of_the_policy_that_it_trains(tmp_path):
    simulated = preset_of("on_policy", tmp_path)
    staleness = simulated.summary["trainer/0"]["staleness"]
    assert (staleness["bound"], staleness["max"], staleness["steps_max"]) == (0, 0, 0)
    assert_nothing_is_left(simulated)


def test_one_step_off_reaches_one_version_never_two_and_nothing_expires(tmp_path):
    simulated = preset_of("one_step_off", tmp_path)
    staleness = simulated.summary["trainer/0"]["staleness"]
    assert (staleness["bound"], staleness["max"]) == (1, 1)
    assert_the_bound_held(tmp_path, 1)
    assert simulated.ledger.attempts.counts()["expired"] == 0
    assert_nothing_is_left(simulated)
