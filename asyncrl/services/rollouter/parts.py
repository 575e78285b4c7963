"""What the wiring gives the rollouter, real or simulated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asyncrl.agents import Agent
from asyncrl.protocols import (
    Fleet,
    FleetView,
    InferenceEngine,
    LedgerClient,
    Prompt,
    PromptCursor,
    PromptSource,
    Sender,
    Tokenizer,
    Tracker,
)
from asyncrl.transport.rpc import RpcClient


class Scorer(Protocol):
    """Scores responses outside the pipeline, for evaluation."""

    async def score(self, items: Sequence[Mapping[str, Any]], timeout: float) -> list[dict[str, Any]]:
        """items: as `asyncrl.rewards.item_of` makes them. One `{"score": float | None, "failure": str | None}`
        each, in order. Raises TransportError when the reward service does not answer within `timeout` seconds."""


class RpcScorer:
    """The Reward service's `score`."""

    def __init__(self, client: RpcClient):
        self._client = client

    async def score(self, items: Sequence[Mapping[str, Any]], timeout: float) -> list[dict[str, Any]]:
        scores: list[dict[str, Any]] = await self._client.call("score", timeout=timeout, items=[dict(item) for item in items])
        return scores


@dataclass(frozen=True)
class RollouterParts:
    """open_source: the training prompts from a cursor on, None for the beginning; agent: how members become trajectories, over
    the same `engine`; eval_prompts: empty where evaluation is off; on_fleet: told of every new view, so that the engine's client
    sends to no server that is behind; run_dir: for eval.jsonl and quarantine.jsonl, None keeps none; closers: end what the wiring
    opened for these parts (clients), after the run."""

    open_source: Callable[[PromptCursor | None], PromptSource]
    eval_prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    engine: InferenceEngine
    agent: Agent
    sender: Sender
    ledger: LedgerClient
    fleet: Fleet
    scorer: Scorer
    tracker: Tracker
    on_fleet: Callable[[FleetView], None] = lambda view: None
    run_dir: Path | None = None
    closers: tuple[Callable[[], Awaitable[None]], ...] = ()
