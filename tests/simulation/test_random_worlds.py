"""Small runs in worlds drawn at random: whatever the speeds, failures, deaths, rules and sizes, the same sentences hold."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import RunError
from asyncrl.simulation.processes import Loss
from asyncrl.simulation.simulate import World, simulate
from tests.services.rollouter_parts import make_config
from tests.simulation.histories import assert_every_prompt_ended_once
from tests.simulation.test_simulate import coin, tenfold_for_half_of_the_rows

one_in = st.sampled_from([1000, 10, 3])  # how often something fails


@st.composite
def configs(draw):
    bound, group_size, groups = draw(st.integers(0, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return make_config(
        seed=draw(st.integers(0, 5)),
        rollout={
            "max_response_tokens": 80,
            "generation_retries": draw(st.integers(0, 1)),
            "group_size": group_size,
            "max_staleness": bound,
            "on_stale": draw(st.sampled_from(["mask", "reissue", "wait"])),
            "max_concurrent": draw(st.sampled_from([1, 4, 7, 256])),
            "quarantine_after": draw(st.sampled_from([0, 1, 3])),
        },
        algorithm={"advantage": draw(st.sampled_from(["grpo", "remax"]))},
        training={
            "steps": draw(st.integers(1, 20)),
            "groups_per_step": groups,
            "publish_every": draw(st.integers(1, 3)) if bound else 1,
            "filter": draw(st.sampled_from(["keep", "drop", "refill"])),
            "data_timeout_seconds": 1e6,
        },
        evaluation={"samples": draw(st.integers(1, 9)), "every": draw(st.sampled_from([0, 1, 7]))},
        queue={
            "capacity": 2 * groups + draw(st.sampled_from([0, 50])),
            "durability": draw(st.sampled_from(["none", "none", "process"])),
            "lease_seconds": draw(st.sampled_from([1.0, 30.0])),
        },
        data={"train": "given", "epochs": draw(st.sampled_from([None, 1, 2])), "shuffle": draw(st.booleans())},
        reward={
            "functions": [{"function": "exact_match"}],
            "min_scored": draw(st.integers(1, group_size)),
            "max_worker_deaths": draw(st.integers(1, 3)),
        },
    )


@st.composite
def deaths(draw):
    """Moments spread over minutes, at which one of those that may die does."""
    rows = st.sampled_from(["rollouter", "reward", "reward/0", "reward/1"])
    gaps = st.sampled_from([0.0, 0.1, 0.7, 3.0, 11.0, 60.0])
    at, losses = 0.0, []
    for row, gap, away in draw(st.lists(st.tuples(rows, gaps, st.sampled_from([0.0, 0.3, 5.0, 29.0])), max_size=25)):
        at += gap
        losses.append(Loss(row, at, away))
    return tuple(losses)


@st.composite
def worlds(draw):
    lost, unscored, lethal = draw(one_in), draw(one_in), draw(st.sampled_from([1000, 50]))
    step_seconds, lag, often = (
        draw(st.sampled_from([0.01, 0.3, 2.0])),
        draw(st.sampled_from([0.2, 3.0, 90.0])),
        draw(st.integers(3, 9)),
    )
    return World(
        token_seconds=draw(st.sampled_from([0.002, 0.05])),
        num_tokens=tenfold_for_half_of_the_rows,
        failure=lambda member: "server lost" if coin(member.rid, lost) == 0 else None,
        max_running=draw(st.sampled_from([None, 2, 16])),
        reward=lambda item: None if coin(item["response"], unscored) == 0 else float(coin(item["response"], 4) == 1),
        score_seconds=draw(st.sampled_from([0.0, 0.01])),
        step_seconds=lambda batch: step_seconds,
        lag=lambda server, version: lag if server == "inference/1" and version % often == often - 1 else 0.2,
        servers=("inference/0", "inference/1")[: draw(st.integers(1, 2))],
        workers=2,
        lethal=lambda item: coin(item["response"] + "!", lethal) == 0,
        losses=draw(deaths()),
        call_seconds=draw(st.sampled_from([0.0, 0.05])),
    )


@settings(max_examples=16, deadline=None)
@given(config=configs(), world=worlds(), rows=st.sampled_from([3, 31, 200]), evaluates=st.booleans())
def test_the_bound_holds_the_ledger_balances_every_prompt_ends_once_and_nothing_is_left(config, world, rows, evaluates):
    with tempfile.TemporaryDirectory() as folder:
        prompts = [f"prompt {row}" for row in range(rows)]
        eval_prompts = prompts[:2] if evaluates else None
        try:
            simulated = simulate(config, Path(folder), prompts=prompts, eval_prompts=eval_prompts, world=world)
        except RunError as error:
            if f"every prompt of data.train is in quarantine, {rows} of {rows}" not in str(error):
                raise
            return
        assert_every_prompt_ended_once(simulated, Path(folder))
        batches = [json.loads(line) for line in (Path(folder) / "batches.jsonl").read_text().splitlines()]
    with_greedy = config.algorithm.advantage.needs.greedy
    assert all((group.greedy is not None) == with_greedy for batch in simulated.batches for group in batch.groups)
    counts = simulated.ledger.attempts.counts()
    assert counts["in_flight"] == counts["queued"] == simulated.unsettled == 0
    for line in batches:
        if line["token_versions"] is not None:
            oldest, newest = line["token_versions"]["min"], line["token_versions"]["max"]
            assert line["version"] - config.rollout.max_staleness <= oldest <= newest <= line["version"]
    assert_the_summary_is_of_all_lives(simulated)
    rollouter_lived = simulated.lives["rollouter"] == 1
    if config.rollout.on_stale == "wait" and rollouter_lived:
        assert counts["expired"] == 0
    if rollouter_lived:
        assert "failed: training is over" not in simulated.ledger.attempts.reasons
    if config.data.epochs is None:
        assert simulated.ledger.attempts.finished_steps == config.training.steps


def assert_the_summary_is_of_all_lives(simulated):
    """Nobody scores what was not generated, or trains what was not scored; no group counts twice."""
    rollouter, front, trainer = (simulated.summary[name] for name in ("rollouter", "reward", "trainer/0"))
    assert rollouter["trajectories"]["generated"] >= trainer["trajectories"]["trained"]
    assert rollouter["tokens"]["generated"] >= trainer["tokens"]["trained"]
    finished = rollouter["trajectories"]["generated"] + rollouter["rollout"]["failed"]
    assert finished >= front["scoring"]["trajectories"]
    counts, scoring = simulated.ledger.attempts.counts(), front["scoring"]
    assert scoring["groups_scored"] >= counts["trained"] + counts["filtered"]
    assert scoring["groups_scored"] + scoring["groups_failed"] <= counts["dispatched"]
    assert scoring["trajectories"] == scoring["scored"] + front["trajectories"]["failed"]
