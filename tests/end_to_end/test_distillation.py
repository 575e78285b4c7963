"""On-policy distillation from end to end: a teacher judges what the student samples."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from asyncrl.engines.embedded import EmbeddedServer, EngineOptions
from tests.end_to_end.runs import Launched, pids_of
from tests.end_to_end.test_short_runs import assert_sound

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]

DISTILLATION = ("algorithm.advantage=distillation",)
OWN = (*DISTILLATION, "algorithm.teacher.path=builtin/arithmetic")


def test_a_teacher_of_the_run_s_own_judges_every_response(tmp_path: Path) -> None:
    """It is the model that the student starts from, so that it says of the first tokens what the server said."""
    run = Launched(tmp_path / "run", *OWN, "rollout.temperature=0.8")
    assert run.wait() == 0, run.text
    assert_sound(run)
    metrics = run.lines("metrics.jsonl")
    assert abs(metrics[0]["teacher/log_ratio"]) < 1e-4
    assert metrics[0]["advantage/abs_mean"] < 1e-4
    assert abs(metrics[-1]["teacher/log_ratio"]) < 0.5
    assert run.summary["samples"]["trained"] == run.summary["samples"]["dispatched"]


async def test_a_teacher_at_a_url_judges_too(tmp_path: Path) -> None:
    from asyncrl.cluster.assembly import model_folder

    server = EmbeddedServer(model_folder("builtin/arithmetic"), EngineOptions(context_tokens=64))
    url = await server.start()
    try:
        run = Launched(tmp_path / "run", *DISTILLATION, f"algorithm.teacher.url={url}")
        await asyncio.to_thread(run.wait)
    finally:
        await server.close()
    assert run.process.returncode == 0, run.text
    assert_sound(run)
    assert abs(run.lines("metrics.jsonl")[0]["teacher/log_ratio"]) < 1e-4


def test_a_teacher_that_is_killed_is_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Launched(tmp_path / "run", *OWN, "training.steps=300", "training.groups_per_step=16")
    run.until_step(5)
    os.kill(pids_of(run.status())["teacher/0"], signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert_sound(run)
    assert run.summary["restarts"] == 1
    assert run.summary["samples"]["failed"] == 0
