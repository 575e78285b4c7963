"""Swapping weights between two decode steps: which version computed what, and that it did."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from asyncrl.errors import GenerationFailed, PlanMismatch
from asyncrl.protocols import PolicyVersion
from tests.engines.harness import Harness, load, random_prompts, reference_log_probs, sequence
from tests.models import tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Four models of one shape and different weights."""
    return [tiny_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(4)]


def weights_of(folder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in load(folder).named_parameters()}


def by_version(spans, length: int) -> list[str]:
    """The version of every token, from spans."""
    starts = [start for _, start in spans] + [length]
    return [version for (version, start), end in zip(spans, starts[1:], strict=False) for _ in range(start, end)]


def commit_while_decoding(engine, folders, sequences, policy) -> None:
    """Commit versions 1, 2, 3 when the first sequence (streaming) has 12, 24, 36 tokens."""
    staged = [weights_of(folder) for folder in folders[1:]]
    held = engine.at(sequences[0], [1, *(12 * (index + 1) for index in range(len(staged)))])
    next(held)(lambda: engine.submit(*sequences[1:]))
    for version, commit in enumerate(held, start=1):
        commit(lambda version=version: engine.loop.commit(staged[version - 1], PolicyVersion(1, version), policy))


def test_recompute_makes_every_token_that_of_its_versions_weights(folders):
    models = dict(zip(("default", "1.1", "1.2", "1.3"), map(load, folders), strict=True))
    with Harness(load(folders[0]), max_slots=4) as engine:
        sequences = [
            sequence(prompt, seed=index, max_new_tokens=60, stream_interval=1)
            for index, prompt in enumerate(random_prompts(6, longest=20))
        ]
        commit_while_decoding(engine, folders, sequences, "recompute")
        updates = engine.results(*sequences)
    seen = set()
    for one, update in zip(sequences, updates, strict=True):
        versions = by_version(update.spans, len(update.token_ids))
        seen.update(versions)
        for version in set(versions):
            expected = reference_log_probs(models[version], one.prompt.tolist(), update.token_ids)
            mine = np.asarray([entry == version for entry in versions])
            np.testing.assert_allclose(update.log_probs[mine], expected[mine], atol=1e-4)
    assert seen == set(models)
    assert len(set(by_version(updates[0].spans, 60))) == 4


def test_keep_goes_on_with_the_old_keys_and_values(folders):
    """Right after the swap a token follows from old keys and values under new weights: neither model alone explains it."""
    with Harness(load(folders[0]), max_slots=4) as engine:
        one = sequence([4, 13, 5, 17], seed=1, max_new_tokens=60, stream_interval=1)
        commit_while_decoding(engine, folders[:2], [one], "keep")
        (update,) = engine.results(one)
    assert [version for version, _ in update.spans] == ["default", "1.1"]
    start = update.spans[1][1]
    for folder in folders[:2]:
        expected = reference_log_probs(load(folder), [4, 13, 5, 17], update.token_ids)
        assert abs(update.log_probs[start] - expected[start]) > 1e-3
        if folder == folders[0]:
            np.testing.assert_allclose(update.log_probs[:start], expected[:start], atol=1e-4)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_request_that_starts_after_a_swap_is_wholly_of_the_new_weights(folders, policy):
    """Also when a sequence with the same prompt, prefilled under the old weights, is still running."""
    prompt = random_prompts(1, shortest=30)[0]
    with Harness(load(folders[0]), max_slots=4) as engine:
        runs_on = sequence(prompt, seed=1, max_new_tokens=50, stream_interval=1)
        fresh = sequence(prompt, seed=2, max_new_tokens=10)
        staged = weights_of(folders[1])
        held = engine.at(runs_on, [2, 4])
        next(held)(lambda: engine.loop.commit(staged, PolicyVersion(1, 1), policy))
        next(held)(lambda: engine.submit(fresh))
        (update,) = engine.results(fresh)
    assert update.spans == (("1.1", 0),)
    assert fresh.cached_tokens == (0 if policy == "keep" else len(prompt) - 1)
    np.testing.assert_allclose(update.log_probs, reference_log_probs(load(folders[1]), prompt, update.token_ids), atol=1e-4)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_staged_tensors_hold_the_old_weights_afterwards(tmp_path, tie):
    old, new = (tiny_model(tmp_path / str(seed), seed=seed, tie=tie) for seed in (0, 1))
    before, staged, after = weights_of(old), weights_of(new), weights_of(new)
    with Harness(load(old)) as engine:
        assert engine.loop.live().keys() == before.keys()
        assert ("lm_head.weight" in before) is not tie
        report = engine.loop.commit(staged, PolicyVersion(1, 1), "keep")
        live = engine.loop.live()
        assert all(torch.equal(live[name], after[name]) for name in after)
        assert all(torch.equal(staged[name], before[name]) for name in before)
        assert engine.loop.version == "1.1"
        assert 0 < report.pause_seconds < 1
        prompt = [4, 13, 5, 17]
        (update,) = engine.run(sequence(prompt, max_new_tokens=10))
    np.testing.assert_allclose(update.log_probs, reference_log_probs(load(new), prompt, update.token_ids), atol=1e-4)


def test_tensors_that_do_not_fit_change_nothing_and_the_engine_lives_on(folders):
    with Harness(load(folders[0])) as engine:
        for spoil in (
            lambda staged: staged.popitem(),
            lambda staged: staged.update({"model.norm.weight": torch.zeros(3)}),
            lambda staged: staged.update({"model.norm.weight": staged["model.norm.weight"].bfloat16()}),
        ):
            staged = weights_of(folders[1])
            spoil(staged)
            with pytest.raises(PlanMismatch):
                engine.loop.commit(staged, PolicyVersion(1, 1), "keep")
        assert engine.loop.version == "default"
        before = weights_of(folders[0])
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.loop.live().items())
        engine.run(sequence([4, 5]))


def test_no_token_is_lost_or_doubled_under_a_storm_of_swaps(folders):
    stop = threading.Event()
    with Harness(load(folders[0]), max_slots=4) as engine:

        def storm() -> None:
            version = 0
            staged = weights_of(folders[1])
            while not stop.is_set():
                version += 1
                engine.loop.commit(staged, PolicyVersion(1, version), "keep" if version % 2 else "recompute")

        thread = threading.Thread(target=storm)
        thread.start()
        sequences = [
            sequence(prompt, seed=i, max_new_tokens=20 + i) for i, prompt in enumerate(random_prompts(20, longest=30, seed=8))
        ]
        updates = engine.run(*sequences)
        stop.set()
        thread.join()
    for one, update in zip(sequences, updates, strict=True):
        assert len(update.token_ids) == len(update.log_probs) == one.sampling.max_new_tokens
        starts = [start for _, start in update.spans]
        assert starts == sorted(set(starts))
        assert starts[0] == 0
    assert len({version for update in updates for version, _ in update.spans}) > 3


def test_an_engine_that_was_closed_refuses_commits(folders):
    with Harness(load(folders[0])) as engine:
        pass
    with pytest.raises(GenerationFailed):
        engine.loop.commit(weights_of(folders[1]), PolicyVersion(1, 1), "keep")
