"""Tiny random models for tests, saved as ordinary Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from asyncrl.engines.builtin.characters import NUM_TOKENS, character_tokenizer


def tiny_model(
    folder: str | Path,
    *,
    architecture: str = "qwen2",
    tie: bool = False,
    vocab: int = NUM_TOKENS,
    hidden: int = 32,
    layers: int = 2,
    context: int = 256,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a random model (qwen2, qwen3 or llama) and the character tokenizer to `folder`; returns the folder.

    Weights are drawn wide enough (standard deviation 0.3) that its answers are neither uniform nor constant.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=context,
        tie_word_embeddings=tie,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **overrides,
    )
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    torch.random.set_rng_state(generator_state)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return Path(folder)
