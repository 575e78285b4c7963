"""One stream of figures to every place that wants it."""

from __future__ import annotations

import io
import json
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.scheduling.groups import FailedGroup
from asyncrl.tracking.console import ConsoleProgress
from asyncrl.tracking.hub import Hub, make_hub
from asyncrl.tracking.mlflow_tracker import MlflowTracker
from asyncrl.tracking.samples import FailedSamples
from tests.messages.samples import trajectory
from tests.tracking.stores import FakeStore
from tests.tracking.test_mlflow import FACTS


def config(**tracking):
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "reward": {"functions": [{"function": "numeric"}]},
            "training": {"steps": 3},
            "tracking": tracking,
        }
    )


async def test_figures_reach_mlflow_and_the_terminal_and_the_end_has_its_status(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    store, stream = FakeStore(), io.StringIO()
    hub = Hub(
        tmp_path,
        mlflow=MlflowTracker(lambda: FACTS, tmp_path, open_store=store),
        console=ConsoleProgress(stream, steps=3, bound=2),
    )
    hub.state("running")
    hub.log("trainer", 3, {"reward/mean": 0.5})
    await hub.close("interrupted", {})
    assert hub.mlflow_run_id == "run1"
    assert store.ended == [("run1", "KILLED")]
    assert [(r.name, r.value) for r in store.records] == [("reward/mean", 0.5)]
    assert stream.getvalue().startswith("running\nstep 3/3: reward 0.500")


async def test_a_part_that_fails_is_left_out_and_the_others_go_on(tmp_path, caplog):
    store = FakeStore()
    console = ConsoleProgress(io.StringIO(), steps=3, bound=2)
    console._stream.close()
    hub = Hub(tmp_path, mlflow=MlflowTracker(lambda: FACTS, tmp_path, open_store=store), console=console)
    hub.log("trainer", 3, {"reward/mean": 0.5})
    hub.log("trainer", 4, {"reward/mean": 0.5})
    hub.state("stopping")
    await hub.close("finished", {})
    assert len(store.records) == 2
    assert caplog.text.count("ConsoleProgress failed") == 1


async def test_without_mlflow_and_progress_nothing_is_written(tmp_path, capsys):
    hub = make_hub(config(mlflow=None), tmp_path, show_progress=False)
    hub.state("running")
    hub.log("trainer", 1, {"reward/mean": 0.5})
    await hub.close("finished", {})
    assert hub.mlflow_run_id is None
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_failed_groups_are_kept_as_text(tmp_path: Path):
    keep = FailedSamples(tmp_path)
    members = (trajectory(0, 0, group_size=2), trajectory(0, 1, group_size=2))
    keep(FailedGroup(members[0].id.group, "too few scored: 1 of 2, timeout", members, ("timeout", None)))
    lines = [json.loads(line) for line in (tmp_path / "failed_samples.jsonl").read_text().splitlines()]
    assert [(line["id"], line["state"], line["reason"]) for line in lines] == [
        ("0/0/0/0", "failed", "timeout"),
        ("0/0/0/1", "failed", "too few scored: 1 of 2, timeout"),
    ]
    assert lines[0]["response"] == "3"
