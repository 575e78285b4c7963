"""What every algorithm has in common in the engine: the cut into micro-batches changes nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.engines.algorithms import ALGORITHMS
from tests.engines.training import VOCAB, batch, config, distance, engine_of_one_rank, uneven_batch
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, tie=True)


@pytest.fixture(scope="module")
def cut(model):
    """Gradients of every algorithm, by token budget: all in one micro-batch, a few to each, one response to each."""
    found, whole = {}, None
    for budget in (10_000, 120, 1):
        with engine_of_one_rank(model, config(training={"microbatch_tokens": budget})) as engine:
            whole = whole or uneven_batch(engine)
            found[budget] = {name: engine.gradients(whole, algorithm) for name, algorithm in ALGORITHMS.items()}
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_the_same_for_any_cut_into_micro_batches(cut, name):
    whole = cut[10_000][name]
    assert any(gradient.any() for gradient in whole.values())
    assert distance(cut[120][name], whole) <= 1e-5
    assert distance(cut[1][name], whole) <= 1e-5


def test_algorithms_differ(cut):
    """So that agreement of their cuts says something of each."""
    alike = [
        {one, other}
        for one, other in itertools.combinations(ALGORITHMS, 2)
        if distance(cut[10_000][one], cut[10_000][other]) < 1e-6
    ]
    same = ({"ppo_clip", "token_mean"}, {"grpo", "staleness_tis"}, {"reinforce", "gpg"}, {"reinforce", "none"}, {"gpg", "none"})
    assert [pair for pair in alike if pair not in same] == []


def test_a_batch_of_which_the_correction_drops_all_moves_no_weight(model):
    algorithm = {"correction": {"name": "geo_mis", "low": 3.0, "high": 3.001}}
    with engine_of_one_rank(model, config(algorithm=algorithm, training={"weight_decay": 0.1})) as engine:
        before = {name: parameter.full_tensor().clone() for name, parameter in engine.named_parameters()}
        outcome = engine.train(batch(epochs=2))
        assert (outcome.updates, outcome.bad_updates) == (0, 0)
        assert (outcome.metrics["tokens/trained"], outcome.metrics["correction/dropped"]) == (0.0, 1.0)
        assert all(torch.equal(parameter.full_tensor(), before[name]) for name, parameter in engine.named_parameters())
