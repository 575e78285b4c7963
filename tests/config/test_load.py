"""From text and overrides to a Config: lines, sources, every problem at once, and a dump that is the same run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import built
from asyncrl.config.load import dump_config, load_config, load_mapping
from asyncrl.config.schema import Config
from asyncrl.config.walk import Node, every_node
from asyncrl.config.yaml_text import read, write
from asyncrl.errors import ConfigError, Problem, UserError
from tests.config.samples import MINIMAL, good_value, is_built, owner_of

TEXT = """\
name: sums
model: {path: builtin/arithmetic}
data: {train: builtin/arithmetic}
rollout:
  max_prompt_tokens: 16
  max_response_tokens: 8
reward:
  functions:
    - function: exact_match
training:
  steps: 30
  learning_rate: 2e-4
"""


def problems_of(path: Path, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(TEXT)
    return path


def edited(pipeline: Path, old: str, new: str) -> Path:
    assert old in TEXT
    pipeline.write_text(TEXT.replace(old, new))
    return pipeline


def test_a_plain_file_loads_with_its_defaults(pipeline: Path) -> None:
    config = load_config(pipeline).config
    assert config.training.learning_rate == 2e-4
    assert config.rollout.group_size == 8
    assert config.algorithm.correction.name == "staleness_tis"


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one(pipeline: Path) -> None:
    (problem,) = problems_of(edited(pipeline, "  steps: 30", "  steps: 30\n  publish_evry: 1"))
    assert (problem.key, problem.line, problem.source) == ("training.publish_evry", 12, str(pipeline))
    assert "training.publish_every" in problem.message


def test_a_key_that_stands_in_the_wrong_section_is_sent_to_its_own(pipeline: Path) -> None:
    (problem,) = problems_of(edited(pipeline, "  steps: 30", "  steps: 30\n  group_size: 8"))
    assert "rollout.group_size" in problem.message


def test_every_problem_is_reported_at_once_in_the_order_of_the_lines(pipeline: Path) -> None:
    edited(
        pipeline, "  max_response_tokens: 8", "  max_response_tokens: eight\n  temperature: 0\n  top_p: 0.9\n  max_staleness: -1"
    )
    problems = problems_of(pipeline, "queue.capacity=none")
    assert [(problem.key, problem.line) for problem in problems] == [
        ("queue.capacity", None),
        ("rollout.max_response_tokens", 6),
        ("rollout.temperature", 7),
        ("rollout.top_p", 8),
        ("rollout.max_staleness", 9),
    ]
    assert problems[0].source == "--set queue.capacity=none"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.correction={name: token_icepop, low: 6.0}", "token_icepop has low 6 and high 5, with nothing between them"),
        ("algorithm.loss=dro", "algorithm.loss.beta is missing, and has no default"),
        ("algorithm.loss={name: 'mine:fn', aggregation: sum}", "algorithm.loss.aggregation is 'sum'"),
        ("algorithm.loss=3", "algorithm.loss is 3, but must be one of ppo_clip"),
        ("algorithm.loss=ppo_clib", "the nearest known one is ppo_clip"),
        ("sync.mode=stagd", "the nearest known one is staged"),
        ("algorithm.correction.capp=2", "the nearest known one is algorithm.correction.cap"),
        ("rollout.top_k=5", "set rollout.top_k to -1"),
        ("rollout.temperature=0.0", "set rollout.temperature above 0"),
        ("training.learning_rate=.nan", "a number, above 0"),
        ("training.steps=1.0", "a whole number, at least 1"),
        ("training.steps=100000000000000000000", "no run counts that far"),
        ("rollout.temperature=.inf", "rollout.temperature is inf, but must be finite"),
        ("reward.functions=[]", "reward.functions is empty"),
        ("training", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("training..steps=3", "KEY=VALUE"),
        ("queue.capacity=[", "not YAML"),
        ("seed.deeper=1", "seed is 0, not a section"),
        ("reward.functions.7.weight=1", "no item of a list of 1"),
        ("reward.functions.weight=1", "no item of a list of 1"),
    ],
)
def test_a_wrong_override_is_refused_with_its_own_text(pipeline: Path, override: str, words: str) -> None:
    edited(pipeline, "name: sums", "name: sums\nseed: 0")
    (problem,) = problems_of(pipeline, override)
    assert words in problem.message
    assert problem.source == f"--set {override}"


@pytest.mark.parametrize("value", ["to_come", "{name: to_come}"])
def test_what_is_not_built_yet_is_said_so(pipeline: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(built, "NOT_BUILT", {"algorithm.advantage": ("to_come",)})
    (problem,) = problems_of(pipeline, f"algorithm.advantage={value}")
    assert "algorithm.advantage is to_come, which is known but not built yet: use one of grpo, rloo" in problem.message


SETTABLE = [
    node for node in every_node() if not node.key.endswith(".name") and (node.is_entry or not node.models) and is_built(node.key)
]


@pytest.mark.parametrize("node", SETTABLE, ids=lambda node: node.key)
def test_every_field_can_be_set_by_an_override(node: Node) -> None:
    key = node.key.replace("reward.functions.", "reward.functions.0.").replace("inference.attach.", "inference.attach.0.")
    value = good_value(node)
    entry = owner_of(key)
    chosen = [f"{key.rpartition('.')[0]}={entry}"] if entry else []
    if "inference.attach." in key:
        chosen.append("inference.attach=[{url: 'http://127.0.0.1:1'}]")
    loaded = load_mapping(MINIMAL, [*chosen, f"{key}={write(value).removesuffix(chr(10) + '...' + chr(10)).strip()}"])
    found = loaded.config.model_dump()
    for part in key.split("."):
        found = found[int(part)] if part.isdigit() else found[part]
    if node.is_entry:
        assert found["name"] == value
    else:
        assert found == value or Path(str(found)).is_absolute() or "sqlite" in str(found)


def test_an_entry_by_its_name_widens_when_a_parameter_is_set() -> None:
    values = {**copy.deepcopy(MINIMAL), "algorithm": {"loss": "ppo_clip"}}
    assert load_mapping(values, ["algorithm.loss.clip_low=0.1"]).config.algorithm.loss.clip_low == 0.1


def test_a_list_can_be_set_as_a_whole_in_yaml() -> None:
    functions = load_mapping(MINIMAL, ["reward.functions=[{function: numeric, weight: 2}]"]).config.reward.functions
    assert [(item.function, item.weight) for item in functions] == [("numeric", 2.0)]


def test_the_last_of_two_overrides_counts() -> None:
    assert load_mapping(MINIMAL, ["training.steps=5", "training.steps=7"]).config.training.steps == 7


def test_the_values_given_are_left_as_they_were() -> None:
    values = copy.deepcopy(MINIMAL)
    load_mapping(values, ["training.steps=5", "queue.capacity=64"])
    assert values == MINIMAL


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "text", "3"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="a pipeline file is a mapping of sections"):
        load_config(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no pipeline file"):
        load_config(tmp_path / "nope.yaml")
    with pytest.raises(UserError, match="is a folder: give the pipeline file in it"):
        load_config(tmp_path)


def test_what_is_no_text_of_a_page_is_refused_with_the_fix(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: x\n# caf\xe9\n")
    with pytest.raises(UserError, match=r"byte 0xe9 on line 2.*save it as UTF-8"):
        load_config(latin)
    with pytest.raises(UserError, match="larger than 2 MB"):
        load_config("/dev/zero")


def test_loading_the_dump_gives_an_equal_config_from_any_folder(pipeline: Path, tmp_path: Path) -> None:
    config = load_config(
        pipeline, ["data.eval=held_out.jsonl", "reward.functions=[{function: mine.py:score}]"], cwd=tmp_path
    ).config
    assert config.data.eval == str(tmp_path / "held_out.jsonl")
    assert config.reward.functions[0].function == f"{tmp_path / 'mine.py'}:score"
    again = tmp_path / "config.yaml"
    again.write_text(dump_config(config))
    assert load_config(again, cwd=Path("/")).config == config


def test_paths_become_absolute_and_names_stay(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    overrides = ["data.train=../rows.parquet", "rollout.agent=pkg.agents:play", "data.eval=pkg.data:rows"]
    overrides += ["model.path=folder", "cluster.state_dir=state"]
    config = load_mapping(MINIMAL, overrides, cwd=tmp_path).config
    assert config.cluster.state_dir == str(tmp_path / "state")
    assert config.model.path == str(tmp_path / "folder")
    assert config.data.train == str(tmp_path.parent / "rows.parquet")
    assert (config.rollout.agent, config.data.eval) == ("pkg.agents:play", "pkg.data:rows")
    assert load_mapping(MINIMAL, ["model.path=owner/model"], cwd=tmp_path).config.model.path == "owner/model"
    assert config.tracking.mlflow is not None
    assert config.tracking.mlflow.uri == f"sqlite:///{tmp_path / 'mlflow.db'}"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(plain)
def test_what_is_written_is_read_back(value: object) -> None:
    assert read(write(value), None).value == value


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 10**9),
    rate=st.floats(1e-12, 1.0),
    name=st.text("abcXYZ019._-", min_size=1, max_size=12),
    weight=st.floats(-5, 5),
)
def test_any_valid_config_survives_its_dump(steps: int, rate: float, name: str, weight: float) -> None:
    values = copy.deepcopy(MINIMAL)
    values["name"], values["training"] = name, {"steps": steps, "learning_rate": rate}
    values["reward"]["functions"][0]["weight"] = weight
    config = load_mapping(values).config
    dumped = read(dump_config(config), None).value
    assert Config.model_validate(dumped) == config
