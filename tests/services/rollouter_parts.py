"""A rollouter in virtual time: real service, real ledger, simulated servers, and a hand that plays trainer and Reward front."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrl.agents import load_agent
from asyncrl.config.schema import Config
from asyncrl.data import open_prompts, prompt_from_row
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.ledger.set_back import Held
from asyncrl.messages import GroupId, Trajectory
from asyncrl.protocols import End, FleetView, ServerView, StepRecord
from asyncrl.services.rollouter import Rollouter, RollouterParts
from asyncrl.simulation.inference import FakeInference
from asyncrl.simulation.loop import VirtualClock


class LetterTokenizer:
    """A token is a letter's code."""

    eos_token_ids = (0,)

    def encode_prompt(self, prompt):
        return [ord(letter) for letter in (prompt if isinstance(prompt, str) else str(prompt))]

    def decode(self, token_ids):
        return "".join(chr(32 + token) for token in token_ids)


class ListSender:
    """Takes everything, unless `room` is cleared."""

    def __init__(self):
        self.sent: list[Trajectory] = []
        self.batches: list[int] = []
        self.closed = False
        self.room = asyncio.Event()
        self.room.set()

    async def send(self, messages):
        assert not self.closed
        await self.room.wait()
        self.batches.append(len(messages))
        self.sent += messages

    async def close(self):
        self.closed = True

    def by_group(self) -> dict[GroupId, list[Trajectory]]:
        groups = defaultdict(list)
        for trajectory in self.sent:
            groups[trajectory.id.group].append(trajectory)
        return groups


class SetFleet:
    """A fleet that shows what it is told."""

    def __init__(self):
        self._changed = asyncio.Event()
        self.view = FleetView(0, 1, None, None, (ServerView("inference/0", "", "STARTING", None),))

    def show(self, confirmed: int | None, state: str = "READY", others: tuple[ServerView, ...] = ()) -> None:
        server = ServerView("inference/0", "", state, confirmed)
        self.view = FleetView(self.view.seq + 1, 1, confirmed, confirmed, (server, *others))
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self, since, timeout):
        if self.view.seq <= since:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self.view


class SetScorer:
    """Every response scores 1, unless `answer` says otherwise; it may raise."""

    def __init__(self):
        self.items: list[dict[str, Any]] = []
        self.answer = lambda item: {"score": 1.0, "failure": None}

    async def score(self, items, timeout):
        self.items += items
        return [self.answer(item) for item in items]


@dataclass
class ListTracker:
    rows: list[tuple[str, int, dict[str, float]]] = field(default_factory=list)

    def log(self, axis, step, metrics):
        self.rows.append((axis, step, dict(metrics)))

    async def close(self):
        pass

    def last(self, axis):
        return next((metrics for name, _, metrics in reversed(self.rows) if name == axis), None)


def make_config(*, rollout=None, training=None, evaluation=None, **sections) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "anything"},
            "data": {"train": "anything.jsonl"},
            "reward": {"functions": [{"function": "exact_match"}]},
            "rollout": {
                "group_size": 2,
                "max_response_tokens": 8,
                "max_prompt_tokens": 32,
                "max_staleness": 2,
                **(rollout or {}),
            },
            "training": {"steps": 10, "groups_per_step": 4, **(training or {})},
            "eval": {"samples": 6, **(evaluation or {})},
            **sections,
        }
    )


class Bench:
    """A rollouter on a bench. `prompts`: rows; `engine`: options of FakeInference."""

    def __init__(self, config: Config, *, prompts=None, epochs=None, eval_rows=(), agent="single_turn", engine=None, **parts):
        self.config, self.clock = config, VirtualClock()
        self.ledger = LocalLedgerClient()
        self.sender, self.fleet, self.scorer, self.tracker = ListSender(), SetFleet(), SetScorer(), ListTracker()
        self.engine = FakeInference(self.clock, **(engine or {}))
        tokenizer = LetterTokenizer()
        rows = prompts if prompts is not None else [f"prompt {row}" for row in range(1000)]
        built = RollouterParts(
            open_source=lambda cursor: open_prompts(rows, seed=config.seed, shuffle=False, epochs=epochs, cursor=cursor),
            eval_prompts=[prompt_from_row(row, number, "data.eval") for number, row in enumerate(eval_rows)],
            tokenizer=tokenizer,
            engine=self.engine,
            agent=load_agent(agent, self.engine, tokenizer, self.clock.now),
            sender=self.sender,
            ledger=self.ledger,
            fleet=self.fleet,
            scorer=self.scorer,
            tracker=self.tracker,
            on_fleet=self.engine.update,
        )
        self.parts = replace(built, **parts)
        self.ledger.held = self._held
        self.rollouter = Rollouter(config, self._connect, clock=self.clock)
        self.running: asyncio.Task[None] | None = None
        self.step = 0

    async def _connect(self, book):
        return self.parts

    async def __aenter__(self):
        self.running = asyncio.create_task(self.rollouter.run({}))
        await asyncio.sleep(0.001)
        return self

    async def __aexit__(self, kind, error, trace):
        if not self.running.done():
            self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    def _held(self) -> Held:
        """The queue keeps what was sent, until its group ends."""
        members = {id: {trajectory.id.member for trajectory in sent} for id, sent in self.sender.by_group().items()}
        scored = [group.id for group in self.ledger.attempts.live() if group.state == "queued"]
        return Held(self.config.members_per_group, scored, members)

    async def lose(self) -> None:
        """The rollouter's process is gone."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    async def restart(self) -> None:
        """Another takes its place. What this one sends comes behind what the queue has."""
        self.sender.closed = False
        self.rollouter = Rollouter(self.config, self._connect, clock=self.clock)
        self.running = asyncio.create_task(self.rollouter.run({}))
        await asyncio.sleep(0.001)

    @property
    def dispatched(self) -> list[GroupId]:
        return [group.id for group in self.ledger.attempts.live()]

    async def settle(self, seconds: float = 60.0) -> None:
        """Let everything happen that can happen by itself."""
        await asyncio.sleep(seconds)

    def whole_groups(self) -> list[GroupId]:
        """Live groups of which every member was sent, oldest first."""
        sent = self.sender.by_group()
        return [id for id in self.dispatched if len(sent[id]) == self.config.members_per_group]

    async def take_step(self, groups=None, *, state="trained", reissue=False, bound=None) -> None:
        """The trainer finishes a step with these groups (default: the oldest whole ones), and the servers confirm its version.
        bound: what it says of the staleness bound."""
        groups = groups if groups is not None else self.whole_groups()[: self.config.training.groups_per_step]
        self.ledger.queue(groups)
        self.step += 1
        ends = tuple(End(id, state, "", reissue) for id in groups)
        version = (self.step - 1) // self.config.training.publish_every
        await self.ledger.finish_step(StepRecord(self.step, version, ends, bound))
        self.fleet.show(self.step // self.config.training.publish_every)

    async def train_to_the_end(self) -> None:
        """Steps until training.steps or the end of the data, then the end of training; the run returns."""
        while self.step < self.config.training.steps:
            await self.settle()
            if not self.whole_groups():
                break
            await self.take_step()
        await self.ledger.finish_training(self.step // self.config.training.publish_every)
        await self.running


def tokens_of(trajectory: Trajectory) -> list[int]:
    return np.asarray(trajectory.response_tokens).tolist()
