"""The engine against transformers: what it computes, and that neighbours, arrivals and slots do not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.engines.embedded.loading import load_model, refuse_short_window
from asyncrl.engines.embedded.runner import ModelRunner
from asyncrl.errors import GenerationFailed, UserError
from tests.engines.harness import WAIT_SECONDS, Harness, load, random_prompts, reference_greedy, reference_log_probs, sequence
from tests.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture
def engine(model):
    with Harness(model) as harness:
        yield harness


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_greedy_tokens_and_log_probs_are_transformers(tmp_path, architecture, tie):
    model = load(tiny_model(tmp_path, architecture=architecture, tie=tie))
    prompts = random_prompts(12, longest=30)
    with Harness(model) as engine:
        assert engine.loop._runner._lean is not None
        updates = engine.run(*(sequence(prompt, temperature=0, max_new_tokens=20) for prompt in prompts))
    for prompt, update in zip(prompts, updates, strict=True):
        assert update.token_ids.tolist() == reference_greedy(model, prompt, 20)
        np.testing.assert_allclose(update.log_probs, reference_log_probs(model, prompt, update.token_ids), atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 256}), ("gpt_neox", {}), ("mixtral", {"num_local_experts": 4})],
)
def test_other_architectures_go_through_transformers_own_forward_pass(tmp_path, architecture, overrides):
    model = load(tiny_model(tmp_path, architecture=architecture, **overrides))
    prompts = random_prompts(6, longest=30)
    with Harness(model, max_slots=4) as engine:
        assert engine.loop._runner._lean is None
        updates = engine.run(*(sequence(prompt, seed=seed, max_new_tokens=20) for seed, prompt in enumerate(prompts)))
    for prompt, update in zip(prompts, updates, strict=True):
        np.testing.assert_allclose(update.log_probs, reference_log_probs(model, prompt, update.token_ids), atol=1e-4)


def test_an_architecture_that_takes_no_masks_from_outside_is_refused_by_name(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot serve BloomForCausalLM"):
        ModelRunner(load(tmp_path), max_slots=2, context=64)


def test_sampled_log_probs_are_those_of_the_temperature_scaled_full_distribution(engine, model):
    prompt = [4, 13, 5, 17]
    for settings in ({"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.8}, {"temperature": 1.0, "top_k": 3}):
        (update,) = engine.run(sequence(prompt, seed=3, max_new_tokens=40, **settings))
        expected = reference_log_probs(model, prompt, update.token_ids, settings["temperature"])
        np.testing.assert_allclose(update.log_probs, expected, atol=1e-4)


def test_bfloat16_samples_in_float32_and_stays_close_to_transformers(tmp_path):
    model = load(tiny_model(tmp_path, dtype=torch.bfloat16), dtype="bfloat16")
    assert next(model.parameters()).dtype == torch.bfloat16
    prompt = [4, 13, 5, 17]
    with Harness(model) as engine:
        (update,) = engine.run(sequence(prompt, seed=1, max_new_tokens=30))
    assert update.log_probs.dtype == np.float32
    np.testing.assert_allclose(update.log_probs, reference_log_probs(model, prompt, update.token_ids), atol=0.2)


def test_tokens_do_not_depend_on_neighbours(engine):
    prompt = [4, 13, 5, 17, 9]
    (alone,) = engine.run(sequence(prompt, seed=11, max_new_tokens=30))
    mine = sequence(prompt, seed=11, max_new_tokens=30)
    crowd = [sequence(other, seed=i, max_new_tokens=5 + i) for i, other in enumerate(random_prompts(14, seed=5))]
    engine.run(*crowd[:7], mine, *crowd[7:])
    (crowded,) = engine.results(mine)
    assert crowded.token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(crowded.log_probs, alone.log_probs, atol=1e-4)


def test_sequences_that_arrive_while_others_decode_are_right(engine, model):
    prompts = random_prompts(10, longest=20, seed=2)
    first = sequence(prompts[0], max_new_tokens=70, temperature=0, stream_interval=1)
    late = [sequence(prompt, max_new_tokens=4 + index, temperature=0) for index, prompt in enumerate(prompts[1:])]
    for one, go in zip(late, engine.at(first, [3 * index + 1 for index in range(len(late))]), strict=True):
        go(lambda one=one: engine.submit(one))
    for one, update in zip([first, *late], engine.results(first, *late), strict=True):
        assert update.token_ids.tolist() == reference_greedy(model, one.prompt.tolist(), one.sampling.max_new_tokens)


def test_more_sequences_than_slots_all_finish(engine, model):
    sequences = [sequence(prompt, temperature=0, max_new_tokens=1 + i % 9) for i, prompt in enumerate(random_prompts(40, seed=3))]
    for one, update in zip(sequences, engine.run(*sequences), strict=True):
        assert update.token_ids.tolist() == reference_greedy(model, one.prompt.tolist(), one.sampling.max_new_tokens)
    assert engine.loop.load() == (0, 0)


def test_samples_of_one_prompt_share_its_prefill(engine):
    prompt = random_prompts(1, shortest=30, seed=4)[0]
    updates = engine.run(*(sequence(prompt, seed=seed, max_new_tokens=3) for seed in range(8)))
    assert engine.loop.stats.prefilled_tokens == len(prompt) - 1
    assert [update.sequence.cached_tokens for update in updates] == [0] + 7 * [len(prompt) - 1]


def test_a_sample_that_starts_later_takes_the_prefix_of_one_that_runs(engine, model):
    prompt = random_prompts(1, shortest=30, seed=4)[0]
    first = sequence(prompt, seed=1, max_new_tokens=50, stream_interval=1)
    second = sequence(prompt, temperature=0, max_new_tokens=10)
    for go in engine.at(first, [2]):
        go(lambda: engine.submit(second))
    (update,) = engine.results(second)
    assert second.cached_tokens == len(prompt) - 1
    assert update.token_ids.tolist() == reference_greedy(model, prompt, 10)


def test_a_prompt_longer_than_a_prefill_chunk(tmp_path):
    model = load(tiny_model(tmp_path, context=1400))
    prompts = random_prompts(2, shortest=1100, longest=1300, seed=6)
    with Harness(model, max_slots=4, context=1400) as engine:
        updates = engine.run(*(sequence(prompt, seed=1, max_new_tokens=6) for prompt in prompts))
    for prompt, update in zip(prompts, updates, strict=True):
        np.testing.assert_allclose(update.log_probs, reference_log_probs(model, prompt, update.token_ids), atol=1e-4)


def test_stop_token_ends_a_sequence_and_is_its_last_token(engine, model):
    prompt = [4, 13, 5, 17]
    greedy = reference_greedy(model, prompt, 20)
    stop = greedy[7]
    (update,) = engine.run(sequence(prompt, temperature=0, max_new_tokens=20, stop_token_ids=(63, stop, 62, 61, 60)))
    assert update.token_ids.tolist() == greedy[: greedy.index(stop) + 1]
    assert (update.finish.kind, update.finish.matched) == ("stop", stop)


def test_generation_ends_at_the_context(engine):
    (update,) = engine.run(sequence([5] * 90, max_new_tokens=50))
    assert len(update.token_ids) == 6
    assert update.finish.kind == "length"


def test_abort_keeps_what_there_is_and_frees_the_slot(engine):
    victims = [sequence([5, 6], max_new_tokens=90, stream_interval=1) for _ in range(2)]
    waiting = [sequence([7, 8], max_new_tokens=90) for _ in range(18)]
    held = engine.at(victims[0], [1, 3])
    next(held)(lambda: engine.submit(victims[1], *waiting))
    next(held)(lambda: engine.loop.abort([victims[0].rid, waiting[-1].rid]))
    first, last = engine.results(victims[0], waiting[-1])
    assert first.finish.kind == last.finish.kind == "abort"
    assert len(first.token_ids) >= 3
    assert len(last.token_ids) == 0
    assert all(update.finish.kind == "length" for update in engine.results(victims[1], *waiting[:-1]))


def test_logits_that_are_not_finite_abort_the_sequence_alone(folder):
    model = load(folder)
    with Harness(model, max_slots=2) as engine:
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            saved = embedding[9].clone()
            embedding[9] = float("nan")
        bad, good = engine.run(sequence([9, 9]), sequence([5, 6]))
        assert "not finite" in bad.finish.message
        assert good.finish.kind == "length"
        with torch.no_grad():
            embedding[9] = saved
        (again,) = engine.run(sequence([9, 9]))
        assert again.finish.kind == "length"


def test_greedy_top_k_1_and_tiny_top_p_agree(engine):
    prompt = [4, 13, 5, 17]
    answers = engine.run(sequence(prompt, temperature=0), sequence(prompt, top_k=1), sequence(prompt, top_p=1e-6))
    assert len({update.token_ids.tobytes() for update in answers}) == 1


def test_a_sliding_window_shorter_than_the_context_is_refused(tmp_path):
    folder = tiny_model(tmp_path, use_sliding_window=True, sliding_window=32, max_window_layers=0, context=256)
    model = load(folder)
    with pytest.raises(UserError, match="attends to 32 tokens"):
        refuse_short_window(model.config, 33)
    ModelRunner(model, max_slots=2, context=32)


def test_a_context_beyond_the_models_is_refused(model):
    with pytest.raises(UserError, match="room for 256"):
        ModelRunner(model, max_slots=2, context=257)


@pytest.mark.parametrize("architecture", ["mamba", "t5"])
def test_what_is_no_key_value_language_model_is_refused_by_name(tmp_path, architecture):
    from transformers import AutoConfig

    AutoConfig.for_model(architecture).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"Mamba|T5"):
        load_model(tmp_path, dtype="float32")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not load"):
        load_model(tmp_path, dtype="float32")


def test_a_loop_that_fails_answers_everybody_and_takes_nothing_more(model):
    with Harness(model, max_slots=2) as engine:
        engine.loop._runner.decode = None
        sequences = [sequence([5, 6]) for _ in range(5)]
        engine.submit(*sequences)
        engine.loop._thread.join(WAIT_SECONDS)
        assert all("the engine ended" in engine.finished(one.rid).finish.message for one in sequences)
        assert isinstance(engine.loop.failure, TypeError)
        with pytest.raises(GenerationFailed):
            engine.submit(sequence([5, 6]))
