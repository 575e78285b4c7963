"""Whole pipelines of a few steps, started as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.runs import Launched, leftovers

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]


def assert_sound(run: Launched) -> None:
    """What holds of every finished run, whatever its settings."""
    summary, batches, metrics = run.summary, run.lines("batches.jsonl"), run.lines("metrics.jsonl")
    samples = summary["samples"]
    assert summary["status"] == "finished"
    assert summary["error"] is None
    assert [row["step"] for row in batches] == list(range(1, summary["steps"] + 1))
    assert len(metrics) == summary["steps"]
    ends = ("trained", "filtered", "failed", "expired", "in_flight", "queued")
    assert samples["dispatched"] == sum(samples[end] for end in ends)
    assert samples["in_flight"] == samples["queued"] == 0
    assert samples["trained"] == sum(len(row["groups"]) for row in batches)
    assert summary["sync"]["verified"] is True
    assert (summary["staleness"]["max"] or 0) <= summary["staleness"]["bound"]
    for row in batches:
        versions = row["token_versions"]
        assert versions is None or row["version"] - versions["min"] <= summary["staleness"]["bound"]
    assert run.command("audit").returncode == 0
    assert leftovers(run.run_dir) == []


def test_a_short_run_finishes_with_a_balanced_ledger(tmp_path: Path) -> None:
    run = Launched(tmp_path / "run")
    assert run.wait() == 0, run.text
    assert_sound(run)
    assert run.summary["steps"] == 6
    assert run.summary["policy_version"] == 6
    assert run.summary["eval"]["first"] is not None
    assert run.summary["mlflow_run_id"]
    assert json.loads(run.command("samples", "--json").stdout)


def test_two_trainer_ranks_and_two_servers(tmp_path: Path) -> None:
    run = Launched(tmp_path / "run", "training.ranks=2", "inference.servers=2", "reward.workers=2")
    assert run.wait() == 0, run.text
    assert_sound(run)


def test_with_bound_zero_every_trained_token_has_the_trainers_version(tmp_path: Path) -> None:
    run = Launched(tmp_path / "run", "rollout.max_staleness=0", "sync.transport=zeromq")
    assert run.wait() == 0, run.text
    assert_sound(run)
    assert run.summary["staleness"]["max"] == 0
    for row in run.lines("batches.jsonl"):
        assert row["token_versions"] in (None, {"min": row["version"], "max": row["version"]})


def test_end_of_data_trains_the_last_batch_as_it_is_and_finishes(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}+1=", "ground_truth": str(a + b + 1)}) + "\n" for a in range(2) for b in range(5))
    )
    run = Launched(tmp_path / "run", f"data.train={rows}", "data.epochs=1", "training.filter=keep", "training.steps=50")
    assert run.wait() == 0, run.text
    assert_sound(run)
    assert run.summary["steps"] == 3
    assert run.summary["samples"]["trained"] == 10
