"""A checkpoint as a Hugging Face folder: what transformers loads is what was trained."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from asyncrl.checkpoint import Checkpoints
from asyncrl.checkpoint import export as room
from asyncrl.checkpoint.dcp import DcpFiles
from asyncrl.checkpoint.export import export_model
from asyncrl.errors import CheckpointError, UserError
from tests.checkpoint.saves import state_of
from tests.engines.training import VOCAB, batch, config, engine_of_one_rank
from tests.models import tiny_model


def trained_checkpoint(run_dir, *, tie, dtype="float32", architecture="qwen2"):
    """(checkpoint, weights) of an engine after a step."""
    model = tiny_model(run_dir / "source", vocab=VOCAB, tie=tie, architecture=architecture)
    checkpoints = Checkpoints(run_dir)
    settings = config()
    with engine_of_one_rank(model, settings, DcpFiles()) as engine:
        engine.train(batch())
        engine.begin_save(str(checkpoints.begin(1)))
        engine.finish_save(60.0)
        weights = {name: parameter.full_tensor().detach().clone() for name, parameter in engine.named_parameters()}
    resolved = settings.to_mapping()
    resolved["model"]["dtype"] = dtype
    return checkpoints.commit(1, state_of(1, config=resolved)), weights


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return trained_checkpoint(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.mark.parametrize(("tie", "architecture"), [(True, "qwen2"), (False, "llama")])
def test_what_transformers_loads_is_what_was_trained(tmp_path, tie, architecture):
    checkpoint, weights = trained_checkpoint(tmp_path, tie=tie, architecture=architecture)
    done = export_model(checkpoint, tmp_path / "out", test=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    assert {name: parameter.tolist() for name, parameter in model.named_parameters()} == {
        name: weight.tolist() for name, weight in weights.items()
    }
    assert done.compared_logits == 32 * VOCAB
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tie
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tie  # noqa: SIM118 (it is no mapping)


def test_the_folder_has_what_a_server_needs(tied, tmp_path):
    export_model(tied[0], tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([5, 6])
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 1
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["architectures"], settings["dtype"]) == (["Qwen2ForCausalLM"], "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_cast_once_to_the_dtype_that_is_asked_for(tied, tmp_path, dtype):
    done = export_model(tied[0], tmp_path / "out", dtype=dtype, test=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == getattr(torch, dtype)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tied[1][name].to(parameter.dtype))
    assert done.dtype == dtype


def test_without_a_wish_the_dtype_is_that_of_the_run(tmp_path):
    checkpoint, _ = trained_checkpoint(tmp_path, tie=True, dtype="bfloat16")
    assert export_model(checkpoint, tmp_path / "out").dtype == "bfloat16"


def test_a_taken_target_is_refused_and_left_alone(tied, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("taken", "file"):
        with pytest.raises(UserError, match="not an empty folder: name a new one"):
            export_model(tied[0], tmp_path / name)
    with pytest.raises(UserError, match="make it first"):
        export_model(tied[0], tmp_path / "no" / "out")
    with pytest.raises(UserError, match="--dtype is int8"):
        export_model(tied[0], tmp_path / "out", dtype="int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def test_code_that_a_model_comes_with_is_run_where_the_exporter_says_so_and_not_where_the_checkpoint_does(tied, tmp_path):
    state = {**tied[0].state, "config": {"model": {"dtype": "float32", "trust_remote_code": True}}}
    another = replace(tied[0], state=state)
    with pytest.raises(UserError, match=r"comes with code of its own .* add --trust-remote-code where you trust its author"):
        export_model(another, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export_model(another, tmp_path / "out", trust_remote_code=True)
    with pytest.raises(CheckpointError, match=r"has no model\.dtype: use another one"):
        export_model(replace(tied[0], state={**tied[0].state, "config": {}}), tmp_path / "other")


def test_an_empty_target_is_taken(tied, tmp_path):
    (tmp_path / "out").mkdir()
    export_model(tied[0], tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_the_test_fails_where_what_was_written_is_not_what_was_trained_and_leaves_nothing(tied, tmp_path, monkeypatch):
    def write_another(model, beside, aside):
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1
        write(model, beside, aside)

    write = room._write
    monkeypatch.setattr(room, "_write", write_another)
    with pytest.raises(CheckpointError, match=r"equals its checkpoint, and .*embed_tokens.weight does not"):
        export_model(tied[0], tmp_path / "out", test=True)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_leaves_nothing(tied, tmp_path, monkeypatch):
    def refuse(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room, "sync_tree", refuse)
    with pytest.raises(CheckpointError, match="make room on the disk"):
        export_model(tied[0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
