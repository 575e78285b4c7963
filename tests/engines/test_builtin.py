"""The built-in model: warmed up to the same point each time, cached whole or not at all."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from asyncrl.engines.builtin import Recipe, prepare
from asyncrl.engines.tokenizer import HfTokenizer
from asyncrl.errors import RunError, UserError
from tests.engines.harness import Harness, load, sequence

builtin = sys.modules[prepare.__module__]  # the function hides its module's name
EXAMPLES = [(f"{a}+{b}=", str(a + b)) for a, b in itertools.product(range(10), repeat=2)]
QUICK = Recipe(target_accuracy=0.05, batch=16)


def test_the_warm_up_ends_at_the_accuracy_asked_for_and_is_the_same_for_the_same_seed(tmp_path):
    recipe = Recipe(target_accuracy=0.12)
    folders = [prepare("builtin/sums", EXAMPLES, seed=3, cache_dir=tmp_path / name, recipe=recipe) for name in "ab"]
    first, second = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == second
    model, tokenizer = load(folders[0]), HfTokenizer(folders[0])
    with torch.no_grad():
        accuracy = float(builtin._answer_log_probs(model, *builtin._tensors(tokenizer._tokenizer, EXAMPLES)).exp().mean())
    assert 0.08 < accuracy < 0.3
    with Harness(model, max_slots=100, context=16) as engine:
        prompts = [tokenizer.encode_prompt(prompt) for prompt, _ in EXAMPLES]
        updates = engine.run(*(sequence(p, seed=seed, max_new_tokens=8, stop_token_ids=(1,)) for seed, p in enumerate(prompts)))
    right = sum(tokenizer.decode(update.token_ids) == answer for update, (_, answer) in zip(updates, EXAMPLES, strict=True))
    assert 0.02 < right / 100 < 0.4


def test_the_cache_tells_seeds_examples_and_recipes_apart_and_keeps_what_it_has(tmp_path):
    first = prepare("builtin/sums", EXAMPLES, seed=0, cache_dir=tmp_path, recipe=QUICK)
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert prepare("builtin/sums", EXAMPLES, seed=0, cache_dir=tmp_path, recipe=QUICK) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    others = {
        prepare("builtin/sums", EXAMPLES, seed=1, cache_dir=tmp_path, recipe=QUICK),
        prepare("builtin/sums", EXAMPLES[:-1], seed=0, cache_dir=tmp_path, recipe=QUICK),
    }
    assert len({first, *others}) == 3
    assert {path.name for path in (tmp_path / "models").iterdir()} == {path.name for path in (first, *others)}


def test_a_builder_overtaken_by_another_takes_the_others_folder_and_leaves_nothing_of_its_own(tmp_path, monkeypatch):
    build, overtakers = builtin._build, []

    def build_slowly(folder, *rest) -> None:
        if not overtakers:
            overtakers.append(folder)
            overtakers.append(prepare("builtin/sums", EXAMPLES, seed=0, cache_dir=tmp_path, recipe=QUICK))
        build(folder, *rest)

    monkeypatch.setattr(builtin, "_build", build_slowly)
    mine = prepare("builtin/sums", EXAMPLES, seed=0, cache_dir=tmp_path, recipe=QUICK)
    assert mine == overtakers[1]
    assert list((tmp_path / "models").iterdir()) == [mine]
    load(mine)


def test_the_cache_lies_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    assert prepare("builtin/sums", EXAMPLES, seed=0, recipe=QUICK).is_relative_to(tmp_path)


def test_a_target_that_is_not_reached_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(RunError, match=r"0\.99"):
        prepare("builtin/sums", EXAMPLES, seed=0, cache_dir=tmp_path, recipe=Recipe(target_accuracy=0.99, max_steps=2))
    assert list((tmp_path / "models").iterdir()) == []


def test_characters_that_the_tokenizer_has_not_are_refused(tmp_path):
    with pytest.raises(UserError, match="Ä"):
        prepare("builtin/x", [("Ä=", "1")], seed=0, cache_dir=tmp_path)
    with pytest.raises(UserError, match="0 examples"):
        prepare("builtin/x", [], seed=0, cache_dir=tmp_path)
