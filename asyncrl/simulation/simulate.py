"""A whole run in one event loop and in virtual time: the real services, queue, ledger and ParameterSync, over simulated machines.

    Rollouter ─▶ LocalQueue "rollouts" ─▶ RewardFront ─▶ LocalQueue "scored" ─▶ TrainerService
        │ FakeInference                      │ one worker: `World.reward`            │ FakeTrainingEngine
        └──────────────◀── SimulatedSync (ParameterSync, `World.lag`) ◀──────────────┘

Every change of the ledger is checked when it happens (`WatchedLedger`): the terms balance, admission kept its bound, and what the
ledger calls in flight and queued is what rollouter, Reward front and queue say they hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.agents import load_agent
from asyncrl.config.schema import Config
from asyncrl.data import open_eval_prompts, open_prompts
from asyncrl.data.opening import Data
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.messages import GroupId
from asyncrl.protocols import (
    Dispatch,
    End,
    FleetView,
    GenerateRequest,
    MemberRequest,
    PromptCursor,
    StepRecord,
    TrainBatch,
    TrainingEngine,
)
from asyncrl.services.message_queue.settling import ROLLOUTS, SCORED, connect, topics_of
from asyncrl.services.reward import FrontParts, RewardFront
from asyncrl.services.rollouter import Rollouter, RollouterParts
from asyncrl.services.service import AddressBook
from asyncrl.services.tasks import first_leaf
from asyncrl.services.trainer import TrainerParts, TrainerService
from asyncrl.services.trainer.parts import LeaderParts
from asyncrl.simulation.inference import FakeInference
from asyncrl.simulation.loop import VirtualClock, run_virtual
from asyncrl.simulation.training import FakeLauncher, FakeTrainingEngine, VirtualBlocking
from asyncrl.simulation.weights import SimulatedSync
from asyncrl.tracking.memory import MemoryTracker
from asyncrl.transport.local import LocalQueue

WORKER = "reward/0"
WORKER_FIELDS = ("prompt", "response", "ground_truth", "extra_info")


def every_other_reward(item: Mapping[str, Any]) -> float | None:
    """1 for responses of even length, else 0."""
    return float(len(item["response"]) % 2 == 0)


@dataclass(frozen=True)
class World:
    """How fast the simulated machines are, and what they answer. Seconds are virtual.

    num_tokens: length of an answer; failure: why a member cannot be generated, or None; reward: a sample's score, None for a
    failed one; lag(server, version): from publication to confirmation.
    """

    token_seconds: float = 0.01
    num_tokens: Callable[[GenerateRequest, MemberRequest], int] | None = None
    failure: Callable[[MemberRequest], str | None] = lambda member: None
    max_running: int | None = None
    reward: Callable[[Mapping[str, Any]], float | None] = every_other_reward
    score_seconds: float = 0.001
    step_seconds: Callable[[TrainBatch], float] = lambda batch: 0.5
    lag: Callable[[str, int], float] = lambda server, version: 0.05
    servers: tuple[str, ...] = ("inference/0",)


@dataclass(repr=False)
class Simulated:
    """What a run left. `summary`: each service's part by row name; `checks`: how often the ledger was checked."""

    ledger: LocalLedgerClient
    summary: dict[str, dict[str, Any]]
    batches: list[TrainBatch]
    metrics: list[tuple[str, int, dict[str, float]]]
    unsettled: int
    checks: int
    seconds: float


def simulate(
    config: Config,
    run_dir: Path,
    *,
    prompts: Data,
    eval_prompts: Data | None = None,
    agent: Any = "single_turn",
    world: World | None = None,
    limit_seconds: float = 1e7,
) -> Simulated:
    """Run `config` to its end. Raises what a service raised, AssertionError for a broken invariant, TimeoutError past the limit,
    Stuck when everything waits for everything."""

    async def main() -> Simulated:
        run = _Run(config, run_dir, world or World(), prompts, eval_prompts, agent)
        return await run.to_the_end()

    try:
        return run_virtual(main(), limit_seconds=limit_seconds)
    except BaseExceptionGroup as group:
        raise first_leaf(group) from group


class WatchedLedger(LocalLedgerClient):
    """A ledger in memory that calls `check` after each change."""

    def __init__(self) -> None:
        super().__init__()
        self.check: Callable[[], None] = lambda: None
        self.check_dispatch: Callable[[Sequence[Dispatch]], None] = lambda groups: None

    async def dispatch(self, groups: Sequence[Dispatch], cursor: PromptCursor) -> None:
        await super().dispatch(groups, cursor)
        self.check_dispatch(groups)
        self.check()

    async def end(self, ends: Sequence[End]) -> None:
        await super().end(ends)
        self.check()

    async def finish_step(self, record: StepRecord) -> None:
        await super().finish_step(record)
        self.check()


class _Letters:
    """A tokenizer of characters."""

    eos_token_ids = (0,)

    def encode_prompt(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        return [ord(letter) for letter in str(prompt)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(32 + token) for token in token_ids)


class _Worker:
    """The line to a reward worker, and the worker."""

    def __init__(self, world: World):
        self._world = world

    async def call(self, method: str, *, timeout: float, **params: Any) -> Any:
        assert method == "score", method
        items: Sequence[Mapping[str, Any]] = params["items"]
        await asyncio.sleep(self._world.score_seconds * len(items))
        scores = [self._world.reward(item) for item in items]
        answers: list[tuple[Any, ...]] = [
            (score, {}, {}, None if score is not None else "the reward function raised") for score in scores
        ]
        return {"seconds": self._world.score_seconds * len(items), "scores": answers}

    async def close(self) -> None:
        """Nothing is held."""


class _Scorer:
    """Scores of the Reward front, by a direct call."""

    def __init__(self, front: RewardFront):
        self._front = front

    async def score(self, items: Sequence[Mapping[str, Any]], timeout: float) -> list[dict[str, Any]]:
        async with asyncio.timeout(timeout):
            return await self._front.score(items=[dict(item) for item in items])


class _Run:
    """One run's parts, joined."""

    def __init__(self, config: Config, run_dir: Path, world: World, prompts: Data, eval_prompts: Data | None, agent: Any):
        self.config, self.world = config, world
        self.clock = VirtualClock()
        self.ledger = WatchedLedger()
        self.tracker = MemoryTracker()
        hooks = connect(self.ledger, topics_of(config), lease_seconds=config.queue.lease_seconds)
        self.queue = LocalQueue(hooks.exchange, clock=self.clock)
        self.engine = FakeInference(
            self.clock,
            token_seconds=world.token_seconds,
            num_tokens=world.num_tokens,
            failure=world.failure,
            max_running=world.max_running,
        )
        self.sync = SimulatedSync(self.clock, servers=world.servers, lag=world.lag, on_commit=self._committed)
        blocking = VirtualBlocking()
        self.trainer_engine = FakeTrainingEngine(blocking, step_seconds=world.step_seconds)
        self.rollouter = Rollouter(config, self._rollouter_parts, clock=self.clock)
        self.front = RewardFront(
            self._front_parts,
            min_scored=config.reward.min_scored,
            limit_seconds=config.reward.timeout_seconds,
            num_functions=len(config.reward.functions),
            clock=self.clock,
            connect=lambda address: _Worker(world),
        )
        launcher = FakeLauncher(self.trainer_engine)
        self.trainer = TrainerService(
            config, run_dir, 0, launcher=launcher, connect=self._trainer_parts, clock=self.clock, run_blocking=blocking
        )
        self._data, self._eval_data, self._agent = prompts, eval_prompts, agent
        self._committed_by: dict[str, int] = {}
        self._in_traffic: list[str] = []
        self._version = 0
        self.checks = 0
        self.ledger.check, self.ledger.check_dispatch = self._check_balance, self._check_admission

    async def to_the_end(self) -> Simulated:
        """As the supervisor has it: the run is over when trainer and rollouter are done, then the others are stopped."""
        await self.sync.start()
        async with asyncio.TaskGroup() as services:
            worker = services.create_task(self._keep_worker_registered())
            front = services.create_task(self.front.run({}))
            rollouter, trainer = services.create_task(self.rollouter.run({})), services.create_task(self.trainer.run({}))
            await asyncio.gather(rollouter, trainer)
            await self.front.stop()
            await front
            worker.cancel()
        await self.sync.close()
        self._check_balance()
        return Simulated(
            ledger=self.ledger,
            summary={service.name: service.summary() for service in (self.rollouter, self.front, self.trainer)},
            batches=self.trainer_engine.batches,
            metrics=self.tracker.records,
            unsettled=sum(len(self.queue.exchange.unsettled(topic)) for topic in (ROLLOUTS, SCORED)),
            checks=self.checks,
            seconds=self.clock.now(),
        )

    # Parts

    async def _rollouter_parts(self, book: AddressBook) -> RollouterParts:
        config, tokenizer = self.config, _Letters()
        data = config.data
        return RollouterParts(
            open_source=lambda cursor: open_prompts(
                self._data, seed=config.seed, shuffle=data.shuffle, epochs=data.epochs, cursor=cursor
            ),
            eval_prompts=open_eval_prompts(self._eval_data, samples=config.eval.samples) if self._eval_data else (),
            tokenizer=tokenizer,
            engine=self.engine,
            agent=load_agent(self._agent, self.engine, tokenizer, self.clock.now),
            sender=self.queue.sender(ROLLOUTS, producer="rollouter"),
            ledger=self.ledger,
            fleet=self.sync.fleet(),
            scorer=_Scorer(self.front),
            tracker=self.tracker,
            on_fleet=self._see_fleet,
        )

    def _front_parts(self, book: AddressBook) -> FrontParts:
        sender = self.queue.sender(SCORED, producer="reward")
        return FrontParts(receiver=self.queue.receiver(ROLLOUTS), sender=sender, ledger=self.ledger, tracker=self.tracker)

    async def _trainer_parts(self, book: AddressBook, engine: TrainingEngine) -> TrainerParts:
        leader = LeaderParts(receiver=self.queue.receiver(SCORED), ledger=self.ledger, tracker=self.tracker)
        return TrainerParts(publisher=self.sync.publisher(), leader=leader)

    async def _keep_worker_registered(self) -> None:
        while True:
            await self.front.register(
                worker=WORKER, incarnation="1", address=WORKER, fields=WORKER_FIELDS, is_serial=True, slots=1
            )
            await asyncio.sleep(1.0)

    def _committed(self, server: str, version: int) -> None:
        self._committed_by[server] = version
        self._set_version()

    def _see_fleet(self, view: FleetView) -> None:
        self._in_traffic = [server.name for server in view.servers if server.takes_traffic]
        self._set_version()

    def _set_version(self) -> None:
        """The one fake engine stands for all servers: it has the version that the slowest of those in traffic has."""
        versions = [self._committed_by[name] for name in self._in_traffic]
        if versions and min(versions) != self._version:
            self._version = min(versions)
            self.engine.set_version(self._version)

    # Invariants

    def _check_admission(self, groups: Sequence[Dispatch]) -> None:
        """live ≤ (min((v + 1 + η)·P, steps) − b)·G after every dispatch, with v as the dispatch gives it."""
        training, attempts = self.config.training, self.ledger.attempts
        for group in groups:
            last_step = min(
                (group.start_version + 1 + self.config.rollout.max_staleness) * training.publish_every, training.steps
            )
            live = len(attempts.live())
            allowed = (last_step - attempts.finished_steps) * training.groups_per_step
            assert live <= allowed, f"{live} groups live after the dispatch of {group.id}, {allowed} allowed"

    def _check_balance(self) -> None:
        """The terms add up, and every live group is where the ledger says, or on its way there."""
        self.checks += 1
        counts = self.ledger.attempts.counts()
        dispatched = counts.pop("dispatched")
        assert dispatched == sum(counts.values()), (dispatched, counts)
        exchange = self.queue.exchange
        queued = {item.group_id for item in exchange.unsettled(SCORED)}
        in_flight = {item.group_id for item in exchange.unsettled(ROLLOUTS)} | set(self.front.in_flight())
        in_flight |= set(self.rollouter.in_flight())
        for group in self.ledger.attempts.live():
            assert str(group.id) in (queued if group.state == "queued" else in_flight), f"{group} is held by nobody"
        ended = {id for id in queued if GroupId.parse(id) not in self.ledger.attempts}
        assert not ended, f"the queue still holds {ended}, which have an end"
