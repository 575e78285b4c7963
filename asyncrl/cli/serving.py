"""`serve`: the embedded engine alone."""

from __future__ import annotations

import re

from asyncrl.errors import UserError
from asyncrl.pipeline.model_folder import read_model

TOKEN = re.compile(r"[\x21-\x7e]{16,}")


def serve(model: str, *, port: int, host: str, token: str | None, dtype: str, max_batch: int, context_tokens: int | None) -> int:
    """Serve until a signal; the exit code. Raises UserError for a model that cannot be read or an option that it cannot have."""
    _check_door(host, token)
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
    return serve(model_folder(model), host=host, port=port, options=options, token=token)


def _check_door(host: str, token: str | None) -> None:
    from asyncrl.transport.hosts import is_here, is_loopback

    if not (is_loopback(host) or is_here(host)):
        raise UserError(
            f"--host is {host}, which is no IPv4 address of this machine: give one, 0.0.0.0 for all of them, or leave it out"
        )
    if token is None and not is_loopback(host):
        raise UserError(
            f"--host is {host}, where others reach this server, and it asks for no token: set ASYNCRL_TOKEN (or --token, which "
            "others on this machine can see), or leave --host out"
        )
    if token is not None and not TOKEN.fullmatch(token):
        raise UserError(
            "--token must be 16 or more visible ASCII characters without spaces, since guessing it is all that it takes: "
            'take one from python -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
