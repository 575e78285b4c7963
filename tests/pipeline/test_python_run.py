"""A whole run of a pipeline that is built in Python alone: a function, rows and an agent that no other process can import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl.errors import ConfigError

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]

SUMS = [{"prompt": f"{a}+{b}+{c}=", "ground_truth": str(a + b + c)} for a in range(4) for b in range(4) for c in range(4)]


def test_functions_rows_and_an_agent_of_the_script_run_and_are_not_taken_from_its_config_alone(tmp_path: Path) -> None:
    longest = 2

    def first_digit(response: str, ground_truth: str) -> dict[str, float]:
        return {"score": float(response[:1] == ground_truth[:1]), "short": float(len(response) <= longest)}

    async def one_turn(prompt: Any, session: Any) -> None:
        await session.generate(prompt.prompt)

    pipeline = asyncrl.Pipeline(
        name="in-python",
        model={"path": "builtin/arithmetic"},
        prompts=SUMS,
        reward=first_digit,
        agent=one_turn,
        rollout={"group_size": 4, "max_prompt_tokens": 16, "max_response_tokens": 8, "max_concurrent": 32},
        training={"steps": 3, "groups_per_step": 4, "filter": "keep"},
        tracking={"mlflow": None},
    )
    run = pipeline.launch(tmp_path / "run", progress=False)
    assert not run.done
    summary = run.wait(200)
    assert run.done
    assert (summary["status"], summary["steps"], summary["samples"]["trained"]) == ("finished", 3, 12)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert {"reward/first_digit", "reward/first_digit/short"} <= last.keys()
    with pytest.raises(ConfigError) as caught:
        asyncrl.Pipeline.from_yaml(tmp_path / "run" / "config.yaml")
    assert {problem.key for problem in caught.value.problems} == {"data.train", "rollout.agent", "reward.functions.0.function"}
    assert all("run " in problem.message and "again" in problem.message for problem in caught.value.problems)
