"""`check` and `launch --dry-run`: what is said of a file without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import __version__
from asyncrl.config.load import load_config
from asyncrl.pipeline.run_dir import claim_run_dir
from tests.cli.harness import QUICKSTART, asyncrl


def test_the_quickstart_is_fine() -> None:
    outcome = asyncrl("check", QUICKSTART)
    assert (outcome.code, outcome.err) == (0, "")
    assert "fine" in outcome.out
    assert asyncrl("check", QUICKSTART, "--json").json["ok"] is True


def test_a_preset_is_shown_as_what_it_sets(tmp_path: Path) -> None:
    lines = QUICKSTART.read_text().splitlines(keepends=True)
    left = "".join(line for line in lines if not line.strip().startswith(("max_staleness:", "on_stale:")))
    file = tmp_path / "pipeline.yaml"
    file.write_text(left.replace("rollout:\n", "rollout:\n  preset: one_step_off\n"))
    for told in (asyncrl("check", file, "--json").json, asyncrl("launch", file, "--dry-run", "--json").json):
        rollout = told["config"]["rollout"]
        assert (rollout["preset"], rollout["max_staleness"], rollout["on_stale"]) == ("one_step_off", 1, "wait")
    assert "at most 1 version, on_stale wait, preset one_step_off" in asyncrl("launch", file, "--dry-run").out
    refused = asyncrl("check", file, "--set", "rollout.max_staleness=2")
    assert refused.code == 2
    assert "rollout.max_staleness is 2, but rollout.preset one_step_off sets it to 1" in refused.err


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["training.stepz=3"], "training.stepz", "training.steps"),
        (["training.steps=three"], "training.steps", "a whole number"),
        (["queue.capacity=16"], "queue.capacity", "to at least 32"),
        (["rollout.group_size=1"], "rollout.group_size", "grpo"),
        (["rollout.max_response_tokens=4096"], "rollout.max_response_tokens", "context"),
        (["data.train=missing.jsonl"], "data.train", "missing.jsonl"),
        (["reward.functions=[{function: exact}]"], "reward.functions", "exact_match"),
        (["model.path=./missing"], "model.path", "no such folder"),
        (["rollout.max_staleness=-1"], "rollout.max_staleness", "at least 0"),
        (["rollout.temperature=0"], "rollout.temperature", "above 0"),
        (["rollout.top_p=0.9"], "rollout.top_p", "set rollout.top_p to 1"),
        (["training.groups_per_step=1", "training.ranks=2"], "training.groups_per_step", "ranks"),
        (["rollout.max_staleness=0", "training.publish_every=2"], "training.publish_every", "set training.publish_every to 1"),
    ],
)
def test_a_wrong_config_is_the_users_mistake_with_key_value_and_fix(overrides: list[str], key: str, words: str) -> None:
    options = [part for override in overrides for part in ("--set", override)]
    for command in (["check"], ["launch", "--dry-run"], ["launch"]):
        outcome = asyncrl(command[0], QUICKSTART, *command[1:], *options)
        assert outcome.code == 2
        assert outcome.err.startswith("error: ")
        assert key in outcome.err
        assert words in outcome.err
        assert "Traceback" not in outcome.err
        assert outcome.out == ""


def test_errors_are_json_too_when_json_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(QUICKSTART.read_text().replace("  steps: 500", "  stepz: 300"))
    outcome = asyncrl("check", file, "--json")
    assert outcome.code == 2
    found = outcome.json
    assert (found["ok"], found["exit_code"]) == (False, 2)
    line = file.read_text().splitlines().index("  stepz: 300") + 1
    assert {"key": "training.stepz", "line": line, "source": str(file)}.items() <= found["problems"][0].items() or {
        "key": "training.stepz", "line": line, "source": str(file)}.items() <= found["problems"][1].items()  # fmt: skip


@pytest.mark.parametrize("arguments", [["check"], ["lunch"], ["launch"], ["check", "a", "b"], ["launch", "--no-such-option"], []])
def test_a_wrong_command_line_exits_with_two_and_no_traceback(arguments: list[str]) -> None:
    outcome = asyncrl(*arguments)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


def test_a_usage_error_is_json_when_json_is_asked() -> None:
    assert asyncrl("launch", "--json").json["exit_code"] == 2


def test_explain_prints_sentence_type_and_default() -> None:
    outcome = asyncrl("check", "--explain", "training.publish_every")
    assert outcome.code == 0
    assert "A new policy version goes out after this many steps." in outcome.out
    assert "a whole number, at least 1" in outcome.out
    assert "default: 1" in outcome.out
    assert asyncrl("check", "--explain", "rollout", "--json").json["parts"]["rollout.group_size"]


def test_explain_of_an_unknown_key_names_the_nearest() -> None:
    outcome = asyncrl("check", "--explain", "training.publish_evry")
    assert outcome.code == 2
    assert "training.publish_every" in outcome.err


def test_a_dry_run_prints_the_plan_and_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = asyncrl("launch", QUICKSTART, "--dry-run", "--run-dir", tmp_path / "run", "--set", "training.ranks=2")
    assert outcome.code == 0
    for words in ("trainer/1", "inference/0", "256 messages", "estimate", "nothing was started"):
        assert words in outcome.out
    assert list(tmp_path.iterdir()) == []
    plan = asyncrl("launch", QUICKSTART, "--dry-run", "--json").json
    assert plan["sizes"]["responses_per_step"] == 128
    assert plan["memory_bytes"] > 0


def test_resuming_a_folder_that_holds_no_run_is_refused() -> None:
    outcome = asyncrl("launch", QUICKSTART, "--resume", "runs/before")
    assert outcome.code == 2
    assert "holds no run" in outcome.err


def test_a_dry_run_refuses_the_folder_that_a_launch_would_refuse(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    outcome = asyncrl("launch", QUICKSTART, "--dry-run", "--run-dir", file)
    assert (outcome.code, "is a file" in outcome.err) == (2, True)


def test_a_dry_run_refuses_what_a_run_that_goes_on_may_not_change(tmp_path: Path) -> None:
    folder = claim_run_dir(tmp_path / "run", load_config(QUICKSTART).config)
    outcome = asyncrl("launch", QUICKSTART, "--dry-run", "--run-dir", folder, "--set", "seed=7")
    assert (outcome.code, "seed was 0 and is 7" in outcome.err) == (2, True)
    assert asyncrl("launch", QUICKSTART, "--dry-run", "--run-dir", folder).code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "logs"]


def test_a_file_and_a_key_to_explain_are_not_asked_at_once() -> None:
    outcome = asyncrl("check", QUICKSTART, "--explain", "training.steps")
    assert (outcome.code, "not both" in outcome.err) == (2, True)


def test_the_version_is_printed() -> None:
    outcome = asyncrl("--version")
    assert (outcome.code, outcome.out) == (0, f"asyncrl {__version__}\n")
