"""What the wiring gives the rollouter, real or simulated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from asyncrl.services.kept_figures import KeptFigures
from asyncrl.services.rollouter.scorer import Scorer


@dataclass(frozen=True)
class RollouterParts:
    """open_source: the training prompts from a cursor on, None for the beginning; agent: how members become trajectories, over
    the same `engine`; eval_prompts: empty where evaluation is off; on_fleet: told of every new view, so that the engine's client
    sends to no server that is behind; run_dir: for eval.jsonl and quarantine.jsonl, None keeps none; kept: the run's
    rollouter.jsonl; closers: end what the wiring opened for these parts (clients), after the run."""

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
    kept: KeptFigures = field(default_factory=KeptFigures)
    closers: tuple[Callable[[], Awaitable[None]], ...] = ()
