"""The training engine on one rank, against transformers and the formulas written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.advantages import RewardBatch, estimate
from asyncrl.engines.fsdp.head import log_probs_of_logits, token_log_probs
from asyncrl.errors import UserError
from tests.engines.training import VOCAB, batch, config, engine_of_one_rank, poisoned
from tests.models import tiny_model

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, tie=True)


def reference_log_probs(model_path, train_batch, temperature=TEMPERATURE):
    """One response at a time through transformers: list of float32[R], with gradient."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    found = []
    for group in train_batch.groups:
        ends = np.cumsum(group.lengths)
        for start, end in zip(ends - group.lengths, ends, strict=True):
            response = torch.tensor(group.response_tokens[start:end], dtype=torch.int64)
            tokens = torch.cat([torch.tensor(group.prompt_tokens, dtype=torch.int64), response])
            logits = model(tokens[None]).logits[0, len(group.prompt_tokens) - 1 : -1] / temperature
            found.append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0] if len(response) else logits[:0, 0])
    return model, found


def ragged(train_batch, name):
    return [
        torch.tensor(part)
        for group in train_batch.groups
        for part in np.split(getattr(group, name), np.cumsum(group.lengths)[:-1])
    ]


def test_log_probs_are_those_of_transformers_at_the_rollout_temperature(model):
    train_batch = batch()
    _, expected = reference_log_probs(model, train_batch)
    with engine_of_one_rank(model, config()) as engine:
        found = engine.log_probs(train_batch)
    masks, rewards = ragged(train_batch, "loss_mask"), np.concatenate([group.rewards for group in train_batch.groups])
    for row, (values, mask, reward) in enumerate(zip(expected, masks, rewards, strict=True)):
        wanted = torch.where(mask & bool(np.isfinite(reward)), values.detach(), 0.0)
        torch.testing.assert_close(found[row, : len(values)], wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_tokens_are_judged_at_any_temperature_and_nothing_is_left_changed(model, temperature):
    train_batch = batch()
    _, expected = reference_log_probs(model, train_batch, temperature)
    masks, rewards = ragged(train_batch, "loss_mask"), np.concatenate([group.rewards for group in train_batch.groups])
    wanted = [values.detach()[mask] for values, mask, reward in zip(expected, masks, rewards, strict=True) if np.isfinite(reward)]
    with engine_of_one_rank(model, config()) as engine:
        before = engine.log_probs(train_batch)
        found = engine.judge(train_batch, temperature, rounded=False)
        rounded = engine.judge(train_batch, temperature, rounded=True)
        after = engine.log_probs(train_batch)
    np.testing.assert_allclose(found, torch.cat(wanted).numpy(), atol=2e-5)
    assert 1e-4 < np.abs(rounded - found).max() < 1.0, "rounding shows, and is no more than rounding"
    assert torch.equal(before, after)


def test_the_gradient_is_that_of_the_formula_written_out(model):
    train_batch = batch()
    reference, log_probs = reference_log_probs(model, train_batch)
    lengths = torch.tensor([len(values) for values in log_probs])
    padded = torch.nn.utils.rnn.pad_sequence
    mask = padded(ragged(train_batch, "loss_mask"), batch_first=True)
    rewards = torch.tensor(np.concatenate([group.rewards for group in train_batch.groups]))
    groups = torch.arange(len(train_batch.groups)).repeat_interleave(4)
    advantages, mask = estimate(config().algorithm.advantage, RewardBatch(rewards, groups, mask))
    current = padded(log_probs, batch_first=True)
    behaviour = padded(ragged(train_batch, "log_probs"), batch_first=True)
    staleness = 3 - padded(ragged(train_batch, "versions"), batch_first=True)
    weights = torch.minimum((current.detach() - behaviour).exp(), 1 + 0.5**staleness)
    loss = (-advantages * (current - current.detach()).exp() * weights)[mask].sum() / mask.sum()
    loss.backward()
    with engine_of_one_rank(model, config()) as engine:
        found = engine.gradients(train_batch)
        outcome = engine.train(train_batch)
    assert lengths.max() == mask.shape[1]
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)
    assert outcome.metrics["loss/policy"] == pytest.approx(loss.item(), abs=1e-5)
    assert outcome.metrics["tokens/trained"] == int(mask.sum())


def test_parameters_have_hugging_face_names_and_a_tied_one_appears_once(model):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with engine_of_one_rank(model, config()) as engine:
        found = {name: parameter.full_tensor() for name, parameter in engine.named_parameters()}
    assert list(found) == [name for name, _ in reference.named_parameters()]
    assert "lm_head.weight" not in found
    torch.testing.assert_close(found["model.norm.weight"], reference.model.norm.weight.data)


def test_an_update_moves_towards_the_better_response(model):
    train_batch = batch(learning_rate=1e-3)
    with engine_of_one_rank(model, config()) as engine:
        before = engine.log_probs(train_batch)
        engine.train(train_batch)
        after = engine.log_probs(train_batch)
    rewards = torch.tensor(np.concatenate([group.rewards for group in train_batch.groups]))
    best = torch.nan_to_num(rewards.view(-1, 4), -1).argmax(1) + 4 * torch.arange(len(train_batch.groups))
    assert (after - before)[best].sum() > 0


def test_the_anchor_is_the_policy_before_the_first_update_of_the_batch(model):
    """The first update sees ratio 1; the second, on other groups, does not: its anchor is not the moved policy."""
    with engine_of_one_rank(model, config()) as engine:
        single = engine.train(batch(learning_rate=1e-3))
        assert single.metrics["policy/kl_proximal"] == 0.0
        several = engine.train(batch(learning_rate=1e-3, mini_batches=3, epochs=2))
    assert several.updates == 6
    assert several.metrics["policy/kl_proximal"] > 1e-7


def test_recompute_with_one_update_makes_no_extra_forward_pass(model):
    with engine_of_one_rank(model, config()) as engine:
        passes = []
        engine._policy.register_forward_hook(lambda *_: passes.append(1))
        engine.train(batch())
        assert len(passes) == 1
        engine.train(batch(mini_batches=2))
        assert len(passes) == 1 + 2 + 2


def test_behave_weighs_every_token_one(model):
    settings = config(algorithm={"proximal": "behave", "correction": "none"})
    with engine_of_one_rank(model, settings) as engine:
        metrics = engine.train(batch()).metrics
    assert metrics["correction/weight_mean"] == metrics["correction/weight_max"] == 1.0
    assert metrics["policy/kl_proximal"] > 0


def test_the_correction_is_reported_by_staleness(model):
    with engine_of_one_rank(model, config()) as engine:
        metrics = engine.train(batch()).metrics
    by_level = [metrics[f"correction/staleness_{level}/tokens"] for level in range(4)]
    assert sum(by_level) == metrics["correction/tokens"] == metrics["tokens/trained"]


def test_a_non_finite_loss_skips_its_update_and_no_other(model):
    with engine_of_one_rank(model, config()) as engine:
        before = {name: parameter.full_tensor().detach().clone() for name, parameter in engine.named_parameters()}
        outcome = engine.train(poisoned(batch()))
        assert (outcome.updates, outcome.bad_updates) == (0, 1)
        assert outcome.metrics["tokens/trained"] == 0.0
        assert "loss/policy" not in outcome.metrics
        for name, parameter in engine.named_parameters():
            assert torch.equal(parameter.full_tensor(), before[name])
        outcome = engine.train(poisoned(batch(mini_batches=2)))
        assert (outcome.updates, outcome.bad_updates) == (1, 1)
        assert all(bool(torch.isfinite(parameter.full_tensor()).all()) for _, parameter in engine.named_parameters())


def test_a_batch_without_a_trainable_token_makes_no_update(model):
    whole = batch()
    empty = tuple(replace(group, loss_mask=np.zeros_like(group.loss_mask)) for group in whole.groups)
    with engine_of_one_rank(model, config()) as engine:
        outcome = engine.train(replace(whole, groups=empty))
        assert (outcome.updates, outcome.bad_updates) == (0, 0)
        assert engine.train(replace(whole, groups=(), mini_batches=())).updates == 0


def test_gradient_checkpointing_changes_no_gradient(model):
    found = []
    for checkpointing in (False, True):
        with engine_of_one_rank(model, config(model={"gradient_checkpointing": checkpointing})) as engine:
            found.append(engine.gradients(batch()))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5)


def test_bfloat16_computes_in_half_precision_on_float32_weights(model):
    with engine_of_one_rank(model, config()) as engine:
        exact = engine.log_probs(batch())
    with engine_of_one_rank(model, config(model={"dtype": "bfloat16"})) as engine:
        rounded = engine.log_probs(batch())
        assert engine.train(batch()).updates == 1
        assert {parameter.dtype for _, parameter in engine.named_parameters()} == {torch.float32}
    assert 0 < (rounded - exact).abs().max() < 0.3


def test_the_learning_rate_of_the_batch_is_the_one_used(model):
    with engine_of_one_rank(model, config()) as engine:
        before = {name: parameter.full_tensor().detach().clone() for name, parameter in engine.named_parameters()}
        engine.train(batch(learning_rate=1e-4))
        moved = max(
            float((parameter.full_tensor().detach() - before[name]).abs().max()) for name, parameter in engine.named_parameters()
        )
    assert moved == pytest.approx(1e-4, rel=0.05), "AdamW's first step moves every weight by the learning rate"


def test_a_soft_cap_on_the_logits_is_found_and_respected(tmp_path):
    path = tiny_model(tmp_path / "gemma", architecture="gemma2", vocab=VOCAB, tie=True, final_logit_softcapping=5.0)
    train_batch = batch(2)
    _, expected = reference_log_probs(path, train_batch)
    with engine_of_one_rank(path, config()) as engine:
        assert engine._policy.plain_head is False
        found = engine.log_probs(train_batch)
        assert engine.train(train_batch).updates == 1
    mask = ragged(train_batch, "loss_mask")[0]
    torch.testing.assert_close(found[0, : len(mask)], torch.where(mask, expected[0].detach(), 0.0), atol=2e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_other_architectures_agree_with_transformers(tmp_path, architecture):
    path = tiny_model(tmp_path / architecture, architecture=architecture, vocab=VOCAB)
    train_batch = batch(2)
    _, expected = reference_log_probs(path, train_batch)
    with engine_of_one_rank(path, config()) as engine:
        assert engine._policy.plain_head is True
        found = engine.log_probs(train_batch)
    mask = ragged(train_batch, "loss_mask")[0]
    torch.testing.assert_close(found[0, : len(mask)], torch.where(mask, expected[0].detach(), 0.0), atol=2e-5, rtol=0)


def test_a_folder_without_a_model_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"model\.path"), engine_of_one_rank(tmp_path, config()):
        pass


# ---- the head --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_elements", [1, 55, 10_000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_chunked_head_equals_whole_logits_in_value_and_gradient(chunk_elements, with_bias):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    hidden, weight, bias = draw(9, 4), draw(11, 4), draw(11) if with_bias else None
    targets, scale = torch.randint(0, 11, (9,)), torch.randn(9, dtype=torch.float64)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    found, entropy, squares = token_log_probs(
        hidden, weight, bias, targets, temperature=0.7, squares=True, chunk_elements=chunk_elements
    )
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected, expected_entropy, expected_squares = log_probs_of_logits(logits, targets, temperature=0.7, squares=True)
    torch.testing.assert_close(squares, expected_squares)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, expected_entropy.detach())
    for mine, theirs in zip(
        torch.autograd.grad((found * scale).sum(), inputs), torch.autograd.grad((expected * scale).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
