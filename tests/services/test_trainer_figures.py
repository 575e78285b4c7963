"""Figures of a step, against numbers counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.services.trainer.figures import (
    Measure,
    StepsOfAge,
    drop_bias,
    ends_of_reward_curve,
    response_metrics,
    reward_metrics,
    staleness_metrics,
    trained_tokens,
)
from asyncrl.services.trainer.records import Records
from tests.services.trainer_world import scored


def test_trained_tokens_are_those_left_in_the_loss_mask():
    group = replace(scored(0, rewards=(0, 1, 1), versions=(2, 5, 6)), loss_mask=np.array([False, True, True]))
    tokens = trained_tokens([group], version=6)
    assert (tokens.tokens, tokens.trajectories, tokens.versions) == (2, 2, (5, 6))
    assert staleness_metrics(tokens, StepsOfAge(publish_every=1, since_version=0)) == {
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "staleness/steps_mean": 0.5,
        "staleness/steps_max": 1.0,
        "staleness/share_0": 0.5,
        "staleness/share_1": 0.5,
    }


def test_staleness_in_steps_counts_those_since_the_tokens_version_was_made():
    """A version every 3 steps: step 9 begins with 8 finished, at version 2, which was made by step 6."""
    tokens = trained_tokens([scored(0, versions=(0, 2))], version=2)
    metrics = staleness_metrics(tokens, StepsOfAge.at(8, publish_every=3))
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2.0)
    assert (metrics["staleness/steps_mean"], metrics["staleness/steps_max"]) == (((8 - 0) + (8 - 6)) / 2, 8.0)


def test_a_newer_token_counts_as_staleness_zero():
    assert trained_tokens([scored(0, versions=(4, 7))], version=5).by_staleness == (1, 1)


def test_no_group_and_no_token_have_no_versions():
    masked = replace(scored(0), loss_mask=np.zeros(2, bool))
    for groups in ([], [masked]):
        tokens = trained_tokens(groups, version=3)
        assert (tokens.tokens, tokens.versions, staleness_metrics(tokens, StepsOfAge(1, 0))) == (0, None, {})


def test_rewards_are_over_scored_members_of_all_groups():
    groups = [scored(0, rewards=(0.0, float("nan")), versions=(0, 0)), replace(scored(1), metrics={"parsed": 0.25})]
    metrics = reward_metrics(groups)
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    assert metrics["reward/std"] == pytest.approx(np.std([0, 0, 1]))
    assert (metrics["reward/exact_match"], metrics["reward/parsed"]) == (pytest.approx(1 / 3), 0.25)
    assert metrics["trajectories/unscored"] == 1


def test_responses_are_measured_by_length_and_by_how_they_ended():
    group = replace(scored(0), finish_reasons=["stop", "length"])
    assert response_metrics([group]) == {"response/tokens_mean": 1.0, "response/tokens_max": 1.0, "response/truncated": 0.5}


def test_the_reward_curve_ends_are_means_of_five_steps_or_five_percent():
    assert ends_of_reward_curve([]) == (None, None)
    assert ends_of_reward_curve([1.0, 3.0]) == (2.0, 2.0)
    assert ends_of_reward_curve(list(range(20))) == (2.0, 17.0)
    assert ends_of_reward_curve(list(range(200))) == (4.5, 194.5)


def test_a_figure_that_json_cannot_hold_is_written_as_null(tmp_path):
    records = Records(tmp_path, samples_per_step=0)
    records.metrics(1, 0, {"grad/norm": float("inf"), "loss/policy": float("nan"), "updates": 1.0})
    records.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "version": 0, "grad/norm": None, "loss/policy": None, "updates": 1.0}


def test_what_expires_shows_as_a_bias_of_what_trains():
    short = replace(scored(0, rewards=(1, 1)), lengths=np.array([2, 2], np.int32))
    long = replace(scored(1, rewards=(0, 0)), lengths=np.array([6, 6], np.int32))
    found = drop_bias(Measure.of([short]), Measure.of([long]))
    assert found == {"drop_bias/tokens": pytest.approx(2 / 4 - 1), "drop_bias/reward": pytest.approx(1 - 0.5)}
    assert drop_bias(Measure.of([short, long]), Measure()) == {"drop_bias/tokens": 0.0, "drop_bias/reward": 0.0}
    assert drop_bias(Measure(), Measure.of([long])) == {}
