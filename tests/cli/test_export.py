"""`asyncrl export`: which checkpoint it takes, what it prints, how it fails."""

from __future__ import annotations

import pytest

from asyncrl.checkpoint import Checkpoints
from asyncrl.checkpoint.dcp import DcpFiles
from tests.checkpoint.saves import save, state_of
from tests.cli.harness import asyncrl
from tests.engines.training import VOCAB, config, engine_of_one_rank
from tests.models import tiny_model


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("run")
    model = tiny_model(folder / "source", vocab=VOCAB)
    checkpoints = Checkpoints(folder)
    with engine_of_one_rank(model, config(), DcpFiles()) as engine:
        for step in (1, 2):
            engine.begin_save(str(checkpoints.begin(step)))
            engine.finish_save(60.0)
            checkpoints.commit(step, state_of(step, config=config().to_mapping()))
    return folder


def test_of_a_run_the_newest_checkpoint_is_exported_and_tested(run_dir, tmp_path):
    outcome = asyncrl("export", run_dir, "--to", tmp_path / "out", "--test", "--json")
    assert outcome.code == 0, outcome.err
    said = outcome.json
    assert (said["ok"], said["step"], said["version"], said["dtype"]) == (True, 2, 2, "float32")
    assert said["checkpoint"].endswith("step_000002")
    assert said["compared_logits"] > 0
    assert said["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_a_checkpoint_is_exported_by_its_folder_and_the_text_says_what_it_is(run_dir, tmp_path):
    outcome = asyncrl(
        "export", run_dir / "checkpoints" / "step_000001", "--to", tmp_path / "out", "--dtype", "bfloat16", "--test"
    )
    assert outcome.code == 0, outcome.err
    assert "step 1, version 1" in outcome.out
    assert "in bfloat16" in outcome.out
    assert "bit for bit" in outcome.out


@pytest.mark.parametrize("as_json", [False, True])
def test_a_mistake_has_exit_code_two_and_says_what_to_do(run_dir, tmp_path, as_json):
    more = ["--json"] if as_json else []
    empty = tmp_path / "empty"
    empty.mkdir()
    for source, words in ((tmp_path / "nowhere", "give a run directory"), (empty, "checkpoint.every was above 0")):
        outcome = asyncrl("export", source, "--to", tmp_path / "out", *more)
        assert outcome.code == 2
        assert words in (outcome.json["error"] if as_json else outcome.err)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("x")
    outcome = asyncrl("export", run_dir, "--to", tmp_path / "taken", *more)
    assert outcome.code == 2
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_a_failure_by_name(tmp_path):
    folder = save(Checkpoints(tmp_path), 1).folder
    (folder / "__0_0.distcp").unlink()
    outcome = asyncrl("export", folder, "--to", tmp_path / "out")
    assert outcome.code == 1
    assert "its file __0_0.distcp is missing: use another one" in outcome.err
