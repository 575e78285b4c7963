"""A whole run of a pipeline that is built in Python alone, in a process of its own as a user's script is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import asyncrl
from asyncrl.errors import ConfigError

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]


def test_functions_rows_and_an_agent_of_the_script_run_and_are_not_taken_from_its_config_alone(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "tests.pipeline.in_python", str(tmp_path / "run")]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=220)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert (summary["status"], summary["steps"], summary["samples"]["trained"]) == ("finished", 3, 12)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert {"reward/first_digit", "reward/first_digit/short"} <= last.keys()
    with pytest.raises(ConfigError) as caught:
        asyncrl.Pipeline.from_yaml(tmp_path / "run" / "config.yaml")
    assert {problem.key for problem in caught.value.problems} == {"data.train", "rollout.agent", "reward.functions.0.function"}
    assert all("run " in problem.message and "again" in problem.message for problem in caught.value.problems)
