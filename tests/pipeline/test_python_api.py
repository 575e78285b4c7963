"""`Pipeline(...)`: Python objects in place of names, and mistakes as mistakes of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl.config.functions import load_function
from asyncrl.errors import ConfigError
from tests.config.samples import MINIMAL

ROWS = [{"prompt": f"{a}+1=", "ground_truth": str(a + 1)} for a in range(4)]
SECTIONS = {name: MINIMAL[name] for name in ("model", "training", "rollout")}


def pipeline(**changes: Any) -> asyncrl.Pipeline:
    return asyncrl.Pipeline(**{"reward": "exact_match", "prompts": ROWS, **SECTIONS, **changes})


class Collection:
    """As a Hugging Face dataset is: a length and rows, and no list."""

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Any:
        return iter(ROWS)


class Frame(Collection):
    def iterrows(self) -> Any:
        return enumerate(ROWS)


@pytest.mark.parametrize("prompts", [ROWS, tuple(ROWS), Collection(), ["1+1=", "1+2="], lambda: ROWS, "builtin/arithmetic"])
def test_prompts_may_be_rows_a_collection_of_them_a_function_or_a_name(prompts: Any) -> None:
    assert pipeline(prompts=prompts, eval_prompts=prompts).config.name == "run"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"prompts": 5}, "prompts"), ({"prompts": ROWS[0]}, "prompts"), ({"prompts": Frame()}, "prompts"),
        ({"prompts": (row for row in ROWS)}, "prompts"), ({"eval_prompts": 5}, "eval_prompts"), ({"prompts": []}, "data.train"),
        ({"data": 5}, "data"), ({"rollout": [1]}, "rollout"), ({"model": "folder"}, "model"), ({"training": None}, "training"),
        ({"reward": 5}, "reward.functions"), ({"reward": []}, "reward.functions"), ({"reward": None}, "reward.functions"),
        ({"reward": {"functions": None}}, "reward.functions"), ({"agent": print}, "rollout.agent"), ({"bogus": 1}, "bogus"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline(**changes)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert key in problem.message


def test_the_example_in_python_has_rows_a_reward_and_a_pipeline_that_passes_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[2] / "pipelines" / "sort_digits.py"
    build, make_rows, score = (load_function(f"{script}:{name}", "test") for name in ("build", "make_rows", "sorted_share"))
    rows = make_rows()
    assert len({row["prompt"] for row in rows}) == len(rows) == 2200
    assert all(score(row["ground_truth"], row["ground_truth"])["score"] == 1.0 for row in rows)
    assert score("2549", "2459") == {"score": 0.0, "right_places": 0.5}
    monkeypatch.setitem(build.__globals__, "prepare", lambda *arguments, **options: "builtin/arithmetic")  # not warmed up
    config = build(steps=20, seed=1).config
    assert (config.training.steps, config.seed, config.data.eval) == (20, 1, config.data.train)
