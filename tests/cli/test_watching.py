"""`status`, `top`, `stop`, `audit` and `samples`, on ended, live and lost runs."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import asyncrl, ended_run, live_run, summary

STATUS = {
    "state": "running", "name": "sums", "run_id": "abc", "step": 12, "steps": 300, "elapsed_s": 8.5,
    "services": [
        {"name": "rollouter", "pid": 11, "host": "here", "state": "generating", "version": 11, "waiting_for": "bound"},
        {"name": "message_queue", "pid": 12, "host": "here", "state": "serving", "version": None,
         "depth": {"rollouts": 3, "scored": 5}},
    ],
    "metrics": {"step": 12, "reward/mean": 0.5, "staleness/max": 2.0, "idle/trainer": 0.25, "idle/trainer/wait_s": 3.0,
                "rollouter/tokens_per_second": 5000.0},
}  # fmt: skip


def started(run: Path, *, pid: int, began: float) -> None:
    (run / "run.json").write_text(json.dumps({"pid": pid, "rpc": "tcp://127.0.0.1:9", "started": began, "run_id": "abc"}))


@pytest.mark.parametrize("command", ["status", "top", "stop", "audit", "samples"])
def test_what_is_no_run_directory_is_the_users_mistake(command: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        outcome = asyncrl(command, folder)
        assert outcome.code == 2
        assert "is no run directory" in outcome.err
        assert asyncrl(command, folder, "--json").json["exit_code"] == 2


def test_status_of_a_live_run_shows_its_processes(tmp_path: Path) -> None:
    with live_run(tmp_path, {"status": lambda: STATUS}) as run:
        outcome, as_json = asyncrl("status", run), asyncrl("status", run, "--json").json
    assert outcome.code == 0
    assert "sums: running, step 12 of 300, 8.5 s" in outcome.out
    assert "message_queue" in outcome.out
    assert as_json["services"] == STATUS["services"]


def test_status_says_which_checkpoint_is_the_newest_and_how_many_failed(tmp_path: Path) -> None:
    told = {"checkpoint": 120, "checkpoints_failed": 2}
    trainer = {"name": "trainer/0", "pid": 13, "host": "here", "state": "training", "version": 121, **told}
    words = "of step 120; 2 failed, see logs/trainer-0.log"
    with live_run(tmp_path / "live", {"status": lambda: {**STATUS, "services": [trainer]}}) as run:
        assert f"checkpoint: {words}" in asyncrl("status", run).out
    why = {**told, "checkpoint_error": "step 130: no room"}
    assert "2 failed, the last of step 130: no room" in asyncrl("status", ended_run(tmp_path / "why", checkpoints=why)).out
    assert words in asyncrl("status", ended_run(tmp_path / "ended", checkpoints=told)).out


def test_status_and_top_say_what_is_out_of_its_range(tmp_path: Path) -> None:
    trainer = {"name": "trainer/0", "pid": 13, "host": "here", "state": "training", "version": 121, "health": ["entropy is low"]}
    with live_run(tmp_path, {"status": lambda: {**STATUS, "services": [trainer]}}) as run:
        assert "health: entropy is low" in asyncrl("status", run).out
        assert "health: entropy is low" in asyncrl("top", run, "--once").out
    sound = {**STATUS, "services": [{**trainer, "health": []}]}
    with live_run(tmp_path / "sound", {"status": lambda: sound}) as run:
        assert "health: every figure is in its sane range" in asyncrl("status", run).out


def test_top_shows_reward_staleness_depths_idle_shares_and_tokens(tmp_path: Path) -> None:
    with live_run(tmp_path, {"status": lambda: STATUS}) as run:
        outcome, as_json = asyncrl("top", run, "--once"), asyncrl("top", run, "--json").json
    for words in ("reward, mean of the step", "0.5", "queue depth, scored", "idle share, trainer", "25%", "5000", "bound"):
        assert words in outcome.out
    assert as_json["figures"]["staleness, most"] == "2"


def test_top_in_a_terminal_draws_a_bar_processes_and_figures() -> None:
    from rich.console import Console

    from asyncrl.cli.watching import _screen

    console = Console(record=True, width=100, file=io.StringIO())
    console.print(_screen(STATUS))
    drawn = console.export_text()
    for words in ("sums: running, step 12 of 300", "rollouter", "generating", "idle share, trainer", "━"):
        assert words in drawn


def test_status_of_an_ended_run_comes_from_its_summary(tmp_path: Path) -> None:
    run = ended_run(tmp_path, reward={"first": 0.4, "last": 0.9}, wall_s=61.2)
    assert "finished, step 300, 61.2 s, reward 0.900" in asyncrl("status", run).out
    found = asyncrl("status", run, "--json").json
    assert (found["state"], found["services"], found["summary"]["steps"]) == ("finished", [], 300)


def test_status_of_a_run_whose_launcher_is_gone_says_so(tmp_path: Path) -> None:
    started(tmp_path, pid=2**22 + 1, began=2e9)
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "reward/mean": 0.1}\n{"step": 5, "rew')
    found = asyncrl("status", tmp_path, "--json").json
    assert (found["state"], found["step"]) == ("lost", 4)
    assert f"go on by launching it again with --run-dir {tmp_path}" in found["error"]
    assert asyncrl("stop", tmp_path).code == 1


def test_a_process_id_that_was_given_to_another_since_is_no_live_run(tmp_path: Path) -> None:
    started(tmp_path, pid=os.getpid(), began=1.0)
    assert asyncrl("status", tmp_path, "--json").json["state"] == "lost"


def test_stop_asks_and_waits_until_the_end_is_written(tmp_path: Path) -> None:
    def stop() -> None:
        ended_run(tmp_path, status="interrupted", steps=12)
        (tmp_path / "run.json").unlink()

    with live_run(tmp_path, {"status": lambda: STATUS, "stop": stop}) as run:
        outcome = asyncrl("stop", run)
    assert outcome.code == 0
    assert "interrupted, step 12" in outcome.out
    again = asyncrl("stop", run)
    assert again.code == 0
    assert "nothing to stop" in again.out


def test_stop_gives_up_on_a_run_that_goes_on(tmp_path: Path) -> None:
    with live_run(tmp_path, {"stop": lambda: None}) as run:
        outcome = asyncrl("stop", run, "--timeout", "1")
    assert outcome.code == 1
    assert "still going after 1 s" in outcome.err


SAMPLES: list[dict[str, Any]] = [
    {"step": 1, "id": "0/5/0/2", "state": "trained", "prompt": "1+1=", "response": "2", "ground_truth": "2", "reward": 1.0},
    {
        "step": 2,
        "id": "0/6/0/1",
        "state": "failed",
        "prompt": [{"role": "user", "content": "hi"}],
        "response": "",
        "reason": "timeout",
    },
    {"step": 2, "id": "0/7/0/0", "state": "trained", "prompt": "2+2=", "response": "5", "ground_truth": "4", "reward": 0.0},
]  # fmt: skip


@pytest.fixture
def sampled_run(tmp_path: Path) -> Path:
    lines = [json.dumps(sample) for sample in SAMPLES]
    (ended_run(tmp_path) / "samples.jsonl").write_text("\n".join([*lines, '{"step": 3, "id"']))
    return tmp_path


def test_samples_prints_prompt_response_reward_and_failure(sampled_run: Path) -> None:
    out = asyncrl("samples", sampled_run).out
    for words in ("1+1=", "reward 1", "user: hi", "failed: timeout", "0/7/0/0", "truth"):
        assert words in out


def test_groups_that_failed_before_the_trainer_saw_them_are_among_the_failed(sampled_run: Path) -> None:
    early = {"step": None, "id": "0/9/0/0", "state": "failed", "reason": "too few scored", "prompt": "x", "response": "y"}
    (sampled_run / "failed_samples.jsonl").write_text(json.dumps(early) + "\n")
    assert "0/9/0/0" in asyncrl("samples", sampled_run, "--state", "failed").out
    assert "--state failed" in asyncrl("samples", sampled_run).out


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ([], ["0/5/0/2", "0/6/0/1", "0/7/0/0"]),
        (["--state", "failed"], ["0/6/0/1"]),
        (["--step", "2"], ["0/6/0/1", "0/7/0/0"]),
        (["--limit", "1"], ["0/7/0/0"]),
        (["--step", "9"], []),
    ],
)
def test_samples_are_chosen_by_state_step_and_number(sampled_run: Path, options: list[str], ids: list[str]) -> None:
    found = asyncrl("samples", sampled_run, "--json", *options).json["samples"]
    assert [sample["id"] for sample in found] == ids


def test_an_unknown_state_of_samples_is_refused(sampled_run: Path) -> None:
    outcome = asyncrl("samples", sampled_run, "--state", "good")
    assert outcome.code == 2
    assert "trained or failed" in outcome.err


def test_audit_of_a_run_without_a_ledger_is_the_users_mistake(tmp_path: Path) -> None:
    outcome = asyncrl("audit", ended_run(tmp_path))
    assert outcome.code == 2
    assert "no ledger" in outcome.err


def test_summaries_of_runs_that_did_nothing_can_be_shown(tmp_path: Path) -> None:
    run = ended_run(tmp_path, **summary(status="failed", error="nothing came up", steps=0))
    outcome = asyncrl("status", run)
    assert outcome.code == 0
    assert "nothing came up" in outcome.out


def test_responses_that_failed_are_counted_with_their_commonest_reason(tmp_path: Path) -> None:
    scoring = {"reasons": {"score: boom": 2, "score: timeout after 1 s": 5}}
    run = ended_run(tmp_path, trajectories={"generated": 64, "trained": 57, "failed": 7}, scoring=scoring)
    assert "64 generated, 7 failed: 5 × score: timeout after 1 s, …" in asyncrl("status", run).out
