"""What a launch refuses before anything starts, from the facts on disk and in user code; no torch is needed to say so."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import dump_config, load_config, load_mapping
from asyncrl.config.paths import not_importable
from asyncrl.errors import ConfigError, Problem, UserError
from asyncrl.pipeline.model_folder import read_model
from asyncrl.pipeline.pipeline import Parts
from asyncrl.pipeline.preflight import preflight
from tests.config.samples import MINIMAL

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"


def problems_of(*overrides: str, parts: Parts | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        preflight(load_mapping(MINIMAL, overrides), parts)
    return caught.value.problems


def model_folder(folder: Path, *, shape: tuple[int, ...] = (4, 2), context: int = 512) -> Path:
    """A folder with the files that a model has, its weights zeros."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": context, "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    }))  # fmt: skip
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_the_quickstart_passes_and_its_facts_are_known() -> None:
    loaded = load_config(QUICKSTART)
    facts = preflight(loaded)
    assert facts.model is not None
    assert facts.model.context_tokens is not None
    assert facts.model.context_tokens >= 128
    assert facts.train is not None
    assert facts.train.rows is not None
    assert facts.eval is not None
    assert facts.train.rows + (facts.eval.rows or 0) == 1000
    assert loaded.config.training.filter == "drop"
    assert loaded.config.training.schedule != "constant"


def test_the_resolved_quickstart_passes_too(tmp_path: Path) -> None:
    config = load_config(QUICKSTART).config
    (tmp_path / "config.yaml").write_text(dump_config(config))
    again = load_config(tmp_path / "config.yaml")
    preflight(again)
    assert again.config == config


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("data.train=no_such.jsonl", "data.train", "no such file"),
        ("data.train=builtin/arithmetics", "data.train", "builtin/arithmetic"),
        ("data.train=something", "data.train", ".jsonl"),
        ("data.train=no_such.py:rows", "data.train", "no such file"),
        ("data.train=no_such_package:rows", "data.train", "no_such_package"),
        ("data.eval=no_such.parquet", "data.eval", "no such file"),
        ("model.path=builtin/arithmetik", "model.path", "builtin/arithmetic"),
        ("model.path=./no_such_folder", "model.path", "no such folder"),
        ("model.path=no_such_folder", "model.path", "no such folder"),
        ("model.path=no_such/", "model.path", "no such folder"),
        ("model.path=no--such/model", "model.path", "neither a folder here nor a hub name"),
        ("model.tokenizer=./no_such_folder", "model.tokenizer", "no such folder"),
        ("model.tokenizer=no_such_folder", "model.tokenizer", "or a hub name"),
        ("model.attention=flash_attention_2", "model.attention", "set model.attention to auto"),
        ("model.attention=flash_attention_2", "model.attention", "which needs a GPU (there is none) and model.dtype bfloat16"),
        ("reward.functions=[{function: exact_macht}]", "reward.functions.0.function", "exact_match"),
        ("reward.functions=[{function: no_such.py:score}]", "reward.functions.0.function", "no such file"),
        ("rollout.agent=no_such.py:play", "rollout.agent", "no such file"),
        ("cluster.state_dir=/dev/null/state", "cluster.state_dir", "/dev/null is a file"),
        ("tracking.mlflow.uri=sqlite:////no/such/folder/mlflow.db", "tracking.mlflow.uri", "make it first"),
    ],
)
def test_what_does_not_exist_is_refused_by_key_with_where_it_was_said(
    override: str, key: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (problem,) = problems_of(override)
    assert problem.key == key
    assert words in problem.message
    assert "{" not in problem.message
    assert key in problem.message
    assert problem.source == f"--set {override}"


def test_all_that_is_missing_is_named_at_once() -> None:
    keys = [problem.key for problem in problems_of("data.train=no.jsonl", "model.path=./no", "queue.capacity=1")]
    assert sorted(keys) == ["data.train", "model.path", "queue.capacity"]


def test_a_bad_row_is_named_with_its_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n{"question": "2+2="}\n')
    (problem,) = problems_of(f"data.train={rows}")
    assert "rows.jsonl:2" in problem.message


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_a_row_that_asks_for_more_than_the_run_has_room_for_is_refused(key: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n{"prompt": "2+2=", "sampling": {"max_new_tokens": 9}}\n')
    (problem,) = problems_of(f"{key}={rows}")
    assert (problem.key, "row 1 asks for sampling.max_new_tokens 9" in problem.message) == (key, True)


def test_messages_are_refused_where_the_tokenizer_has_no_chat_template(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "1+1="}]}\n')
    (problem,) = problems_of(f"data.train={rows}")
    assert (problem.key, "no chat template" in problem.message) == ("data.train", True)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    preflight(load_config(QUICKSTART, [f"data.train={rows}", f"model.tokenizer={tmp_path}"]))


def test_a_reward_file_is_imported_and_its_function_looked_up(tmp_path: Path) -> None:
    file = tmp_path / "rewards_of_mine.py"
    file.write_text("def score(response, ground_truth):\n    return 1.0\n\ndef broken(reponse):\n    return 1.0\n")
    preflight(load_mapping(MINIMAL, [f"reward.functions=[{{function: '{file}:score'}}]"]))
    (missing,) = problems_of(f"reward.functions=[{{function: '{file}:scor'}}]")
    assert "score" in missing.message
    (wrong,) = problems_of(f"reward.functions=[{{function: '{file}:broken'}}]")
    assert "response" in wrong.message


def test_an_object_that_cannot_be_imported_is_refused_by_name_of_its_script_unless_it_is_given() -> None:
    override = f"reward.functions=[{{function: '{not_importable('/home/me/sums.py')}'}}]"
    (problem,) = problems_of(override)
    assert problem.key == "reward.functions.0.function"
    assert "/home/me/sums.py" in problem.message

    def score(response: str) -> float:
        return float(len(response))

    preflight(load_mapping(MINIMAL, [override]), Parts(rewards={0: score}))


def test_a_model_folder_is_read_without_torch(tmp_path: Path) -> None:
    facts = read_model(str(model_folder(tmp_path / "model")))
    assert (facts.context_tokens, facts.parameters, facts.head_dim, facts.kv_heads) == (512, 8, 16, 2)


def test_a_response_longer_than_the_models_own_context_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", context=20)
    (problem,) = problems_of(f"model.path={folder}")
    assert f"the context of {folder} is 20 tokens" in problem.message


@pytest.mark.parametrize(
    ("says", "refused"),
    [
        ({"sliding_window": 20}, "look back 20 tokens"),
        ({"sliding_window": 20, "use_sliding_window": False}, None),
        ({"sliding_window": 20, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]}, "look back 20 tokens"),
        ({"sliding_window": 24}, None),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"model_type": "mamba"}, "mamba"),
    ],
)
def test_what_the_engine_cannot_cache_is_refused_before_anything_starts(
    says: dict[str, Any], refused: str | None, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | says))
    if refused is None:
        preflight(load_mapping(MINIMAL, [f"model.path={folder}"]))
        return
    (problem,) = problems_of(f"model.path={folder}")
    assert refused in problem.message


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "cannot be read"),
        ("config.json", b"[]", "holds no object"),
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors", b"", "cannot be read"),
        ("model.safetensors", b"\xff" * 64, "cannot be read"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_a_damaged_model_folder_is_refused_by_its_file(tmp_path: Path, file: str, content: bytes | None, words: str) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_model(str(folder))


def test_weights_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(UserError, match="cut short"):
        read_model(str(folder))


def test_whether_a_reward_is_async_is_known_where_it_can_be_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "judges.py"
    file.write_text("async def judge(response):\n    return 1.0\n\ndef count(response):\n    return 1.0\n")
    judge, count = (f"{{function: '{file}:{name}'}}" for name in ("judge", "count"))
    assert preflight(load_mapping(MINIMAL, [f"reward.functions=[{judge}, {count}]"])).async_rewards is True
    assert preflight(load_mapping(MINIMAL, [f"reward.functions=[{count}]"])).async_rewards is False
    (problem,) = problems_of(f"reward.functions=[{count}]", "reward.concurrency=4")
    assert problem.key == "reward.concurrency"
    preflight(load_mapping(MINIMAL, [f"reward.functions=[{judge}]", "reward.concurrency=4"]))


def test_a_state_folder_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.ledger.file_systems.file_system_of", lambda folder, *, mounts: "nfs4")
    (problem,) = problems_of(f"cluster.state_dir={tmp_path}")
    assert (problem.key, "network file system (NFS)" in problem.message) == ("cluster.state_dir", True)
