"""The embedded engine as one thing: model, loop and HTTP, started and closed together."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from asyncrl.engines.embedded.http import HttpFront, Updates
from asyncrl.engines.embedded.loading import context_limit, load_model
from asyncrl.engines.embedded.loop import COMMIT_SECONDS, EngineLoop
from asyncrl.engines.embedded.runner import ModelRunner
from asyncrl.engines.embedded.wire import Limits
from asyncrl.engines.tokenizer import HfTokenizer
from asyncrl.errors import UserError

DEFAULT_CONTEXT_TOKENS = 4096
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """context_tokens: prompt plus response that there is room for; None takes the model's own, at most 4096.
    max_batch: sequences decoded at once. threads: torch's, within an operation. batch_invariant: a request's tokens and log-probs
    depend, bit for bit, on its prompt and seed alone; "auto": where the model can be served so, else as usual with a warning.
    commit_seconds: the deadline of a swap of weights."""

    dtype: str = "float32"
    device: str = "cpu"
    context_tokens: int | None = None
    max_batch: int = 128
    threads: int = 1
    tokenizer: str | None = None
    trust_remote_code: bool = False
    batch_invariant: bool | Literal["auto"] = False
    commit_seconds: float = COMMIT_SECONDS


class EmbeddedServer:
    """`start` loads the model (off the event loop), binds, and returns the URL; `engine` is the WeightTarget."""

    def __init__(self, model_path: str | Path, options: EngineOptions):
        self._path, self._options = str(model_path), options
        self._engine: EngineLoop | None = None
        self._front: HttpFront | None = None

    @property
    def started(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> EngineLoop:
        assert self._engine is not None, "the server has not started"
        return self._engine

    async def start(self, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None) -> str:
        """token: what every request must bring. Raises UserError for a model that cannot be served, OSError for an address that
        is taken."""
        runner, tokenizer = await asyncio.to_thread(self._load)
        self._engine = EngineLoop(runner, Updates(), commit_seconds=self._options.commit_seconds)
        self.engine.start()
        limits = Limits(runner.context, runner.vocab_size, tokenizer.eos_token_ids, tokenizer.encode_prompt)
        self._front = HttpFront(self.engine, limits, model_path=self._path, decode=tokenizer.decode, token=token)
        return await self._front.start(host, port)

    def _load(self) -> tuple[ModelRunner, HfTokenizer]:
        options = self._options
        torch.set_num_threads(options.threads)
        model = load_model(self._path, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code)
        context = options.context_tokens or min(context_limit(model.config) or DEFAULT_CONTEXT_TOKENS, DEFAULT_CONTEXT_TOKENS)
        if context < 2:
            raise UserError(f"the context is {context} tokens, and a prompt and its response need at least 2: raise it")
        tokenizer = HfTokenizer(
            options.tokenizer or self._path, model_path=self._path, trust_remote_code=options.trust_remote_code
        )
        return self._runner(model, context), tokenizer

    def _runner(self, model: Any, context: int) -> ModelRunner:
        wanted, max_slots = self._options.batch_invariant, self._options.max_batch
        if wanted != "auto":
            return ModelRunner(model, max_slots=max_slots, context=context, batch_invariant=wanted)
        try:
            return ModelRunner(model, max_slots=max_slots, context=context, batch_invariant=True)
        except UserError as error:
            log.warning("requests are not served batch-invariantly: %s", error)
            return ModelRunner(model, max_slots=max_slots, context=context)

    async def close(self) -> None:
        """Abort what runs, end the loop, give the port back. May be called at any time, and twice."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self._front is not None:
            await self._front.close()
