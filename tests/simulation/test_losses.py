"""Whole runs in virtual time in which processes die: every prompt ends exactly once, the bound holds, nothing hangs."""

import pytest

from asyncrl.simulation.processes import Loss
from asyncrl.simulation.simulate import World, simulate
from tests.services.rollouter_parts import make_config
from tests.simulation.histories import assert_every_prompt_ended_once
from tests.simulation.test_random_worlds import assert_the_summary_is_of_all_lives
from tests.simulation.test_simulate import (
    assert_nothing_is_left,
    assert_the_bound_held,
    coin,
    lines,
    tenfold_for_half_of_the_rows,
)

PROMPTS = [f"prompt {row}" for row in range(60)]
HELD_OUT = ["held out 0", "held out 1"]


def run(
    tmp_path, losses, *, steps=40, durability="none", rollout=None, training=None, data=None, world=None, sections=None, **options
):
    config = make_config(
        rollout={"max_response_tokens": 80, "generation_retries": 0, **(rollout or {})},
        training={"steps": steps, "groups_per_step": 2, "data_timeout_seconds": 1000.0, **(training or {})},
        evaluation={"samples": 4, "every": 10},
        queue={"durability": durability, "lease_seconds": 5.0},
        **({"data": data} if data else {}),
        **(sections or {}),
    )
    given = World(
        token_seconds=0.05,
        num_tokens=tenfold_for_half_of_the_rows,
        reward=lambda item: float(coin(item["response"], 4) == 1),
        score_seconds=0.05,
        step_seconds=lambda batch: 0.3,
        losses=tuple(losses),
        **(world or {}),
    )
    return simulate(config, tmp_path, prompts=PROMPTS, eval_prompts=HELD_OUT, world=given, limit_seconds=50_000, **options)


def every(seconds, row, *, until, back_after=1.3):
    return [Loss(row, seconds * (number + 1), back_after) for number in range(int(until / seconds))]


@pytest.mark.parametrize("durability", ["none", "process"])
@pytest.mark.parametrize("row", ["rollouter", "reward", "reward/0"])
def test_a_process_that_dies_again_and_again_costs_time_alone(tmp_path, row, durability):
    simulated = run(tmp_path, every(4.1, row, until=400), durability=durability)
    assert simulated.lives[row] > 5
    assert simulated.ledger.attempts.finished_steps == 40
    assert_nothing_is_left(simulated)
    assert_the_bound_held(tmp_path, 2)
    assert_every_prompt_ended_once(simulated, tmp_path)
    assert_the_summary_is_of_all_lives(simulated)
    assert simulated.ledger.attempts.counts()["failed"] == 0


@pytest.mark.parametrize("on_stale", ["mask", "reissue", "wait"])
def test_all_of_them_together_until_the_end_of_the_data(tmp_path, on_stale):
    losses = [*every(7.3, "rollouter", until=300), *every(5.9, "reward", until=300), *every(3.7, "reward/0", until=300)]
    simulated = run(
        tmp_path,
        losses,
        steps=1000,
        rollout={"on_stale": on_stale, "max_staleness": 1},
        data={"train": "given", "epochs": 1},
        world={"call_seconds": 0.02, "workers": 2},
    )
    assert_nothing_is_left(simulated)
    assert_the_bound_held(tmp_path, 1)
    assert_every_prompt_ended_once(simulated, tmp_path)
    assert {id.row for id, *_ in simulated.ledger.transitions} == set(range(60))


def test_evaluations_take_place_once_each_whoever_dies(tmp_path):
    losses = [*every(9.1, "rollouter", until=300), *every(5.9, "reward", until=300)]
    evaluation = run(tmp_path, losses).summary["rollouter"]["eval"]
    occasions = [record["occasion"] for record in evaluation["history"]]
    assert occasions == ["first", *["scheduled"] * (len(occasions) - 2), "last"]
    assert [record["samples"] for record in evaluation["history"]] == [4] * len(occasions)
    assert evaluation["history"][-1]["version_min"] == 40


def test_a_prompt_whose_every_sample_kills_its_worker_is_quarantined_and_the_others_train(tmp_path):
    simulated = run(
        tmp_path, (), steps=120, world={"lethal": lambda item: item["prompt"] == "prompt 7"}, rollout={"quarantine_after": 2}
    )
    reasons = simulated.ledger.attempts.reasons
    assert reasons["failed: too few scored"] == 2
    assert reasons["failed: quarantined"] >= 1
    failed = [transition for transition in simulated.ledger.transitions if transition.state == "failed"]
    assert {transition.id.row for transition in failed} == {7}
    assert failed[0].reason == "too few scored: 0 of 2, its worker died 2 times while scoring it"
    assert simulated.lives["reward/0"] == 1 + 2 * 2 * 2
    assert "prompt 7" in (tmp_path / "quarantine.jsonl").read_text()
    assert_every_prompt_ended_once(simulated, tmp_path)
    assert lines(tmp_path)
