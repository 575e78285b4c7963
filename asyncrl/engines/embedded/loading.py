"""Loading a model, and refusing by name what the engine cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STATE_SPACE = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")


def load_model(path: str | Path, *, dtype: str, device: str = "cpu", trust_remote_code: bool = False) -> Any:
    """A causal LM in evaluation mode, parameters without gradients. Raises UserError for a folder that is none."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"trust_remote_code": trust_remote_code}  # never None: transformers would ask on the terminal
    try:
        config = AutoConfig.from_pretrained(path, **options)
        refuse_by_config(config)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], **options)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path is {str(path)!r}, which does not load as a causal language model: {error}") from error
    return model.to(device).eval().requires_grad_(False)


def context_limit(config: Any) -> int | None:
    """Positions that the model was made for; None where its configuration names no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def refuse_by_config(config: Any) -> None:
    """Raise UserError for architectures whose state is no KV cache of keys and values."""
    text = config.get_text_config()
    name = type(config).__name__.removesuffix("Config")
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"the embedded engine serves causal language models; {name} is an encoder-decoder: use another model")
    stateful = sorted(set(getattr(text, "layer_types", None) or ()) & set(STATE_SPACE))
    if stateful or "mamba" in text.model_type:
        kinds = ", ".join(stateful) or "mamba"
        raise UserError(
            f"the embedded engine keeps keys and values only; {name} has layers with another state "
            f"({kinds}): use inference.engine: sglang"
        )


def refuse_short_window(config: Any, context: int) -> None:
    """Raise UserError where a sliding window (or attention chunk) would cut into the context that is to be served."""
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None) or ()
    for field, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
        window = getattr(text, field, None)
        if (
            window
            and window < context
            and (kind in layer_types or (not layer_types and getattr(text, "use_sliding_window", True)))
        ):
            raise UserError(
                f"the model attends to {window} tokens at most ({field}), and the context to serve is {context}: "
                f"lower the context (rollout.max_prompt_tokens + rollout.max_response_tokens) to {window}, "
                "or use inference.engine: sglang"
            )
