"""Whole runs in virtual time, thousands of steps: the bound, the order under `wait`, the ledger, the end.

Every change of the ledger in these runs is checked as it happens: the terms balance, admission kept its bound, and each live
group is held by whom the ledger says (`asyncrl.simulation.simulate`).
"""

import json
import zlib

import pytest

from asyncrl.checkpoint import Checkpoints
from asyncrl.config.schema import CheckpointConfig
from asyncrl.errors import RunError
from asyncrl.services.rollouter import admission
from asyncrl.simulation.simulate import World, simulate
from tests.services.rollouter_parts import make_config

PROMPTS = [f"prompt {row}" for row in range(50)]
HELD_OUT = ["held out 0", "held out 1"]
SLOW = 80  # tokens of a slow row's answers, ten times those of the others


def coin(text, of):
    """One of `of` outcomes, by the text alone."""
    return zlib.crc32(text.encode()) % of


def tenfold_for_half_of_the_rows(request, member):
    longest = SLOW if request.prompt_tokens[-1] % 2 else SLOW // 10
    return longest - coin(member.rid, longest // 2)


ROUGH = World(
    token_seconds=0.05,
    num_tokens=tenfold_for_half_of_the_rows,
    failure=lambda member: "server lost" if coin(member.rid, 40) == 0 else None,
    reward=lambda item: None if coin(item["response"], 50) == 0 else float(coin(item["response"], 4) == 1),
    step_seconds=lambda batch: 0.3,
    lag=lambda server, version: 3.0 if version % 11 == 7 else 0.2,
)


def run(tmp_path, *, rollout=None, training=None, queue=None, prompts=PROMPTS, world=ROUGH, steps=150, sections=None, **options):
    config = make_config(
        rollout={"max_response_tokens": SLOW, "generation_retries": 0, **(rollout or {})},
        training={"steps": steps, "groups_per_step": 2, "data_timeout_seconds": 300.0, **(training or {})},
        evaluation={"samples": 4, "every": 40},
        **({"queue": queue} if queue else {}),
        **(sections or {}),
    )
    options.setdefault("eval_prompts", HELD_OUT)
    return config, simulate(config, tmp_path, prompts=prompts, world=world, **options)


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "batches.jsonl").read_text().splitlines()]


def assert_nothing_is_left(simulated):
    counts = simulated.ledger.attempts.counts()
    assert counts["in_flight"] == counts["queued"] == simulated.unsettled == 0
    assert counts["dispatched"] == sum(counts[end] for end in ("trained", "filtered", "failed", "expired"))
    assert "failed: training is over" not in simulated.ledger.attempts.reasons
    assert simulated.checks >= simulated.ledger.attempts.finished_steps


def assert_the_bound_held(tmp_path, bound):
    for line in lines(tmp_path):
        versions = line["token_versions"]
        if versions is not None:
            assert line["version"] - bound <= versions["min"] <= versions["max"]
            assert versions["max"] <= line["version"]


@pytest.mark.parametrize("on_stale", ["mask", "reissue", "wait"])
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_the_bound_is_reached_and_never_passed(tmp_path, on_stale, bound):
    _, simulated = run(tmp_path, rollout={"max_staleness": bound, "on_stale": on_stale})
    staleness = simulated.summary["trainer/0"]["staleness"]
    assert min(bound, 1) <= staleness["max"] <= bound
    assert_the_bound_held(tmp_path, bound)
    assert_nothing_is_left(simulated)
    assert simulated.ledger.attempts.finished_steps == 150
    if on_stale == "wait":
        assert simulated.ledger.attempts.counts()["expired"] == 0
    trained = [group for line in lines(tmp_path) for group in line["groups"]]
    assert len(set(trained)) == len(trained) == simulated.ledger.attempts.counts()["trained"]


def test_where_generation_is_slow_groups_do_expire_and_under_wait_the_trainer_idles_instead(tmp_path):
    world = World(token_seconds=0.5, num_tokens=tenfold_for_half_of_the_rows, step_seconds=lambda batch: 0.01)
    _, reissued = run(tmp_path / "reissue", rollout={"max_staleness": 1, "on_stale": "reissue"}, world=world, steps=40)
    assert reissued.ledger.attempts.counts()["expired"] > 10
    _, waited = run(tmp_path / "wait", rollout={"max_staleness": 1, "on_stale": "wait"}, world=world, steps=40)
    assert waited.ledger.attempts.counts()["expired"] == 0
    assert waited.summary["trainer/0"]["idle"]["trainer"] > 0.5


@pytest.mark.parametrize("on_stale", ["mask", "wait"])
def test_versions_that_come_every_third_step_keep_the_bound_too(tmp_path, on_stale):
    _, simulated = run(tmp_path, rollout={"max_staleness": 1, "on_stale": on_stale}, training={"publish_every": 3})
    assert simulated.summary["trainer/0"]["staleness"]["max"] == 1
    assert_the_bound_held(tmp_path, 1)
    assert_nothing_is_left(simulated)


@pytest.mark.parametrize("filter", ["keep", "drop", "refill"])
@pytest.mark.parametrize("on_stale", ["reissue", "wait"])
def test_filters_leave_the_ledger_balanced(tmp_path, filter, on_stale):
    _, simulated = run(tmp_path, rollout={"on_stale": on_stale}, training={"filter": filter}, steps=100)
    counts = simulated.ledger.attempts.counts()
    assert (counts["filtered"] == 0) == (filter == "keep")
    assert_the_bound_held(tmp_path, 2)
    assert_nothing_is_left(simulated)
    if on_stale == "wait":
        assert counts["expired"] == 0


@pytest.mark.parametrize("on_stale", ["mask", "reissue", "wait"])
def test_the_end_of_data_ends_the_run(tmp_path, on_stale):
    prompts = PROMPTS[:31]
    config = make_config(
        rollout={"max_response_tokens": SLOW, "on_stale": on_stale, "max_staleness": 1},
        training={"steps": 1000, "groups_per_step": 4},
        data={"train": "given", "epochs": 2},
    )
    simulated = simulate(config, tmp_path, prompts=prompts, world=ROUGH)
    assert_nothing_is_left_of(simulated, 62)
    assert 4 <= simulated.ledger.attempts.finished_steps <= 16


def assert_nothing_is_left_of(simulated, rows):
    counts = simulated.ledger.attempts.counts()
    assert counts["in_flight"] == counts["queued"] == simulated.unsettled == 0
    assert "failed: training is over" not in simulated.ledger.attempts.reasons
    assert counts["dispatched"] >= rows


def test_a_queue_smaller_than_what_is_under_way_only_makes_senders_wait(tmp_path):
    """`rollouts` holds 8 items, groups are of 8, and 16 groups are interleaved."""
    rollout = {"group_size": 8, "max_staleness": 3, "max_concurrent": 128}
    _, simulated = run(tmp_path, rollout=rollout, training={"groups_per_step": 4}, queue={"capacity": 8}, steps=20)
    assert_nothing_is_left(simulated)
    assert simulated.summary["rollouter"]["trajectories"]["generated"] > 600


def test_servers_that_lag_hold_generation_back_and_nothing_breaks(tmp_path):
    """One of two servers misses its deadline now and then: it is STALE for a while, and comes back."""
    world = World(
        token_seconds=0.02,
        step_seconds=lambda batch: 0.3,
        servers=("inference/0", "inference/1"),
        lag=lambda server, version: 90.0 if server == "inference/1" and version % 20 == 19 else 0.5,
    )
    _, simulated = run(tmp_path, rollout={"max_staleness": 2}, world=world, steps=100)
    assert_the_bound_held(tmp_path, 2)
    assert_nothing_is_left(simulated)


def test_a_fleet_that_confirms_nothing_more_ends_the_run_with_an_error(tmp_path):
    world = World(lag=lambda server, version: 1e6 if version >= 5 else 0.1)
    with pytest.raises(RunError, match="no scored group arrived"):
        run(tmp_path, world=world, steps=100)


def test_a_group_larger_than_all_places_runs_in_parts(tmp_path):
    _, simulated = run(tmp_path, rollout={"group_size": 6, "max_concurrent": 4}, steps=30)
    assert_nothing_is_left(simulated)
    assert all(group.group_size == len(group.lengths) == 6 for batch in simulated.batches for group in batch.groups)


def test_an_agent_of_two_turns_trains_on_its_own_tokens_alone(tmp_path):
    async def agent(prompt, session):
        await session.generate(prompt.prompt, max_new_tokens=8)
        await session.generate([*session.tokens, 7, 7], max_new_tokens=8)

    _, simulated = run(tmp_path, agent=agent, steps=30)
    masks = [group.loss_mask for batch in simulated.batches for group in batch.groups]
    assert masks
    assert all((~mask).sum() >= 2 for mask in masks)
    assert_nothing_is_left(simulated)


def test_a_run_evaluates_before_during_and_after(tmp_path):
    _, simulated = run(tmp_path, steps=100)
    evaluation = simulated.summary["rollouter"]["eval"]
    assert [record["step"] for record in evaluation["history"]] == [0, 40, 80, 100]
    assert evaluation["history"][0]["version_max"] == 0
    assert evaluation["history"][-1]["version_min"] == 100
    assert evaluation["last"] == evaluation["history"][-1]["score"]


def test_the_same_run_twice_is_the_same(tmp_path):
    for name in ("one", "two"):
        run(tmp_path / name, rollout={"on_stale": "reissue", "max_staleness": 1}, steps=60)
    assert lines(tmp_path / "one") == lines(tmp_path / "two")


def test_an_admission_that_is_too_generous_is_seen(tmp_path, monkeypatch):
    generous = admission.may_start
    monkeypatch.setattr(admission, "may_start", lambda *values: generous(*values) + 1)
    with pytest.raises(AssertionError, match="allowed"):
        run(tmp_path, steps=20)


def test_checkpoints_are_made_and_told_to_the_ledger_while_everything_goes_on(tmp_path):
    config = make_config(
        rollout={"max_response_tokens": SLOW, "generation_retries": 0},
        training={"steps": 60, "groups_per_step": 2, "data_timeout_seconds": 300.0},
    ).model_copy(update={"checkpoint": CheckpointConfig(every=10, keep=3)})
    simulated = simulate(config, tmp_path, prompts=PROMPTS, world=ROUGH)
    assert_nothing_is_left(simulated)
    saved = Checkpoints(tmp_path).complete()
    assert [info.step for info in saved] == [40, 50, 60]
    assert saved[-1].state["tally"]["tokens"] == simulated.summary["trainer/0"]["tokens"]["trained"]
