"""The critic: its loss and advantages against formulas written out, what it learns, and that it is saved with the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.checkpoint.dcp import DcpFiles
from asyncrl.config.schema import Config
from tests.engines.training import VOCAB, batch, config, engine_of_one_rank
from tests.models import tiny_model

GAE = {"name": "gae", "gamma": 0.95, "lam": 0.8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, tie=True)


def settings(critic: dict | None = None, **sections) -> Config:
    algorithm = {"advantage": GAE, "critic": {"learning_rate": 1e-2, **(critic or {})}}
    return config(algorithm=algorithm, **sections)


def prepared(engine, whole):
    """A step's work with the critic's judgement of it."""
    work, plans = engine._prepare(whole)
    return work, engine._anchor(work, plans, updates=1)


def test_values_are_the_head_on_the_hidden_state_before_each_token(model):
    with engine_of_one_rank(model, settings(training={"microbatch_tokens": 60})) as engine:
        head = engine._critic._model.head
        with torch.no_grad():
            weight = torch.linspace(-1, 1, head.weight.numel())[None]
            head.weight.to_local().copy_(weight)
        work, _ = prepared(engine, batch())
    body = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).base_model
    row = 0
    for group in batch().groups:
        ends = np.cumsum(group.lengths)
        for start, end in zip(ends - group.lengths, ends, strict=True):
            tokens = torch.tensor([*group.prompt_tokens.tolist(), *group.response_tokens[start:end].tolist()])[None]
            hidden = body(input_ids=tokens).last_hidden_state[0, len(group.prompt_tokens) - 1 : -1]
            expected, mask = (hidden @ weight.T)[:, 0], work.mask_BT[row, : end - start]
            torch.testing.assert_close(work.values_BT[row, : end - start][mask], expected[mask], atol=1e-5, rtol=1e-4)
            row += 1


def test_advantages_and_returns_are_those_of_the_formula(model):
    with engine_of_one_rank(model, settings()) as engine:
        for _ in range(3):
            engine.train(batch())
        work, _ = prepared(engine, batch(seed=3))
    values, mask, rewards = work.values_BT.double(), work.mask_BT, work.rewards.rewards_B.double()
    raw, returns = torch.zeros_like(values), torch.zeros_like(values)
    for row in range(len(mask)):
        following, value_after = 0.0, 0.0
        places = torch.nonzero(mask[row])[:, 0].tolist()
        for place in reversed(places):
            reward = rewards[row].item() if place == places[-1] else 0.0
            delta = reward + GAE["gamma"] * value_after - values[row, place].item()
            following = delta + GAE["gamma"] * GAE["lam"] * following
            value_after = values[row, place].item()
            raw[row, place], returns[row, place] = following, following + value_after
    assert values[mask].abs().max() > 0.05, "the critic has learnt something"
    white = (raw[mask] - raw[mask].mean()) / (raw[mask].var() + 1e-8).sqrt()
    torch.testing.assert_close(work.advantages_BT[mask].double(), white, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(work.returns_BT[mask].double(), returns[mask], atol=1e-5, rtol=1e-5)


def test_the_critics_update_is_the_same_for_any_cut(model):
    found = []
    for budget in (10_000, 60, 1):
        with engine_of_one_rank(model, settings(training={"microbatch_tokens": budget})) as engine:
            outcome = engine.train(batch())
            weights = {name: parameter.full_tensor().clone() for name, parameter in engine._critic._model.named_parameters()}
            found.append((outcome.metrics["critic/loss"], outcome.metrics["critic/grad_norm"], weights))
    for loss, norm, weights in found[1:]:
        assert (loss, norm) == (pytest.approx(found[0][0], rel=1e-4), pytest.approx(found[0][1], rel=1e-4))
        for name, weight in found[0][2].items():
            torch.testing.assert_close(weights[name], weight, atol=2e-3, rtol=1e-3)


def test_the_critic_learns_what_responses_are_worth(model):
    with engine_of_one_rank(model, settings()) as engine:
        explained = [engine.train(replace(batch(), step=step)).metrics["critic/explained_variance"] for step in range(1, 41)]
    assert explained[0] < 0.1
    assert explained[-1] > 0.8


def test_while_the_critic_warms_up_the_policy_stays(model):
    with engine_of_one_rank(model, settings({"warmup_steps": 2})) as engine:
        before = {name: parameter.full_tensor().clone() for name, parameter in engine.named_parameters()}
        head = engine._critic._model.head.bias.full_tensor().clone()
        outcome = engine.train(replace(batch(), step=2))
        assert (outcome.updates, outcome.bad_updates) == (0, 0)
        assert all(torch.equal(parameter.full_tensor(), before[name]) for name, parameter in engine.named_parameters())
        assert not torch.equal(engine._critic._model.head.bias.full_tensor(), head)
        assert engine.train(replace(batch(), step=3)).updates == 1


def test_a_checkpoint_has_the_critic_and_its_optimizer(model, tmp_path):
    files = DcpFiles()
    with engine_of_one_rank(model, settings(), files) as engine:
        for step in (1, 2):
            engine.train(replace(batch(), step=step))
        engine.begin_save(str(tmp_path / "saved"))
        engine.finish_save(30)
        after = engine.train(replace(batch(seed=1), step=3))
    with engine_of_one_rank(model, settings(), files) as engine:
        engine.load(str(tmp_path / "saved"))
        again = engine.train(replace(batch(seed=1), step=3))
    timeless = lambda metrics: {name: value for name, value in metrics.items() if not name.startswith("time/")}  # noqa: E731
    assert timeless(again.metrics) == pytest.approx(timeless(after.metrics), rel=1e-5)


def test_without_an_advantage_that_needs_one_there_is_no_critic(model):
    with engine_of_one_rank(model, config()) as engine:
        assert engine._critic is None
        assert not [name for name in engine.train(batch()).metrics if name.startswith("critic/")]
