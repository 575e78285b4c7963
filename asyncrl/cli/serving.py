"""`serve`: the embedded engine alone."""

from __future__ import annotations

from asyncrl.errors import UserError
from asyncrl.pipeline.model_folder import read_model


def serve(model: str, *, port: int, host: str, dtype: str, max_batch: int, context_tokens: int | None, as_json: bool) -> int:
    """Serve until a signal. Raises UserError for a model that cannot be read."""
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype is {dtype}, but must be float32 or bfloat16")
    facts = read_model(model, needs_tokenizer=False)
    if context_tokens is not None and facts.context_tokens is not None and context_tokens > facts.context_tokens:
        raise UserError(f"--context-tokens is {context_tokens}, but the context of {model} is {facts.context_tokens}: lower it")
    from asyncrl.services.inference import serve

    serve(model, port=port, host=host, dtype=dtype, max_batch=max_batch, context_tokens=context_tokens)
    return 0
