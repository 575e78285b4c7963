"""`serve`: the embedded engine alone."""

from __future__ import annotations

from asyncrl.errors import UserError
from asyncrl.pipeline.model_folder import read_model


def serve(model: str, *, port: int, host: str, dtype: str, max_batch: int, context_tokens: int | None) -> int:
    """Serve until a signal; the exit code. Raises UserError for a model that cannot be read or an option that it cannot have."""
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype is {dtype}, but must be float32 or bfloat16")
    try:
        facts = read_model(model, needs_tokenizer=False)
    except UserError as error:
        raise UserError(str(error).replace("model.path is", "MODEL is")) from error
    if context_tokens is not None and facts.context_tokens is not None and context_tokens > facts.context_tokens:
        raise UserError(f"--context-tokens is {context_tokens}, but the context of {model} is {facts.context_tokens}: lower it")
    from asyncrl.cluster.assembly import model_folder
    from asyncrl.engines.embedded import EngineOptions
    from asyncrl.services.inference import serve

    options = EngineOptions(dtype=dtype, max_batch=max_batch, context_tokens=context_tokens)
    return serve(model_folder(model), host=host, port=port, options=options)
