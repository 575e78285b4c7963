"""A whole run in one event loop and in virtual time: the real services, queue, ledger and ParameterSync, over simulated machines.

    Rollouter ─▶ LocalQueue "rollouts" ─▶ RewardFront ─▶ LocalQueue "scored" ─▶ TrainerService
        │ FakeInference                      │ Workers: `World.reward`               │ FakeTrainingEngine
        └──────────────◀── SimulatedSync (ParameterSync, `World.lag`) ◀──────────────┘

Every change of the ledger is checked when it happens (`WatchedLedger`): the terms balance, admission kept its bound, and what the
ledger calls in flight and queued is what rollouter, Reward front and queue say they hold. `World.losses` are processes that die.
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
from asyncrl.errors import DeadlineExceeded
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.ledger.states import Changes, Transition
from asyncrl.messages import GroupId
from asyncrl.protocols import (
    Dispatch,
    End,
    FleetView,
    GenerateRequest,
    MemberRequest,
    PromptCursor,
    StepOutcome,
    StepRecord,
    TrainBatch,
    TrainingEngine,
)
from asyncrl.services.kept_figures import KeptFigures
from asyncrl.services.message_queue.beginning import Beginning
from asyncrl.services.message_queue.recovery import Fresh
from asyncrl.services.message_queue.settling import ROLLOUTS, SCORED, connect, topics_of
from asyncrl.services.reward import FrontParts, RewardFront
from asyncrl.services.rollouter import Rollouter, RollouterParts
from asyncrl.services.service import AddressBook
from asyncrl.services.tasks import cancel, first_leaf
from asyncrl.services.trainer import TrainerParts, TrainerService
from asyncrl.services.trainer.parts import LeaderParts
from asyncrl.simulation.inference import FakeInference
from asyncrl.simulation.loop import VirtualClock, run_virtual
from asyncrl.simulation.processes import LateSender, Lines, Loss, MortalReceiver, Row
from asyncrl.simulation.teacher import FakeTeacher, Judge, by_the_tokens
from asyncrl.simulation.training import FakeLauncher, FakeTrainingEngine, VirtualBlocking
from asyncrl.simulation.weights import SimulatedSync
from asyncrl.simulation.workers import Workers
from asyncrl.tracking.memory import MemoryTracker
from asyncrl.transport.local import LocalQueue, LocalReceiver


def every_other_reward(item: Mapping[str, Any]) -> float | None:
    """1 for responses of even length, else 0."""
    return float(len(item["response"]) % 2 == 0)


@dataclass(frozen=True)
class World:
    """How fast the simulated machines are, and what they answer. Seconds are virtual.

    num_tokens: length of an answer; failure: why a member cannot be generated, or None; reward: a sample's score, None for a
    failed one; judge: what the teacher says of one, in a run that has a teacher, after `judge_seconds`; outcome: what a step
    reports, None for one whose every update is made; lag(server, version): from publication to confirmation; workers: reward
    workers; lethal: whether a sample kills its worker, which is back after `back_after`; losses: who dies when; call_seconds: a
    call of one that may die to the ledger takes so long, and its answer too.
    """

    token_seconds: float = 0.01
    num_tokens: Callable[[GenerateRequest, MemberRequest], int] | None = None
    failure: Callable[[MemberRequest], str | None] = lambda member: None
    max_running: int | None = None
    reward: Callable[[Mapping[str, Any]], float | None] = every_other_reward
    score_seconds: float = 0.001
    judge: Judge = by_the_tokens
    judge_seconds: float = 0.01
    step_seconds: Callable[[TrainBatch], float] = lambda batch: 0.5
    outcome: Callable[[TrainBatch], StepOutcome] | None = None
    lag: Callable[[str, int], float] = lambda server, version: 0.05
    servers: tuple[str, ...] = ("inference/0",)
    workers: int = 1
    lethal: Callable[[Mapping[str, Any]], bool] = lambda item: False
    losses: tuple[Loss, ...] = ()
    back_after: float = 1.0
    call_seconds: float = 0.0


@dataclass(repr=False)
class Simulated:
    """What a run left. `summary`: each service's part by row name; `checks`: how often the ledger was checked; `lives`: processes
    by row, of those that may die."""

    ledger: WatchedLedger
    summary: dict[str, dict[str, Any]]
    batches: list[TrainBatch]
    metrics: list[tuple[str, int, dict[str, float]]]
    unsettled: int
    checks: int
    seconds: float
    lives: dict[str, int]


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
    """A ledger that calls `check` after each change, and remembers every transition."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions: list[Transition] = []
        self.check: Callable[[], None] = lambda: None
        self.check_start: Callable[[Sequence[Dispatch]], None] = lambda groups: None

    def _record(self, changes: Changes) -> None:
        self.transitions += changes.transitions
        super()._record(changes)

    async def dispatch(self, groups: Sequence[Dispatch], cursor: PromptCursor) -> None:
        await super().dispatch(groups, cursor)
        self.check_start(groups)
        self.check()

    async def restart(self, groups: Sequence[Dispatch]) -> None:
        await super().restart(groups)
        self.check_start(groups)
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


class _Scorer:
    """Scores of the Reward front that is up, by direct calls."""

    def __init__(self, front: Row[RewardFront]):
        self._front = front

    async def score(self, items: Sequence[Mapping[str, Any]], timeout: float) -> list[dict[str, Any]]:
        while True:
            if not self._front.is_up:
                await self._front.began.wait()
            scoring = asyncio.ensure_future(self._front.service.score(items=[dict(item) for item in items]))
            replaced = asyncio.ensure_future(self._front.began.wait())
            try:
                await asyncio.wait((scoring, replaced), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if scoring.done() and self._front.is_up:
                    return scoring.result()
                if not replaced.done():
                    raise DeadlineExceeded(f"no score within {timeout:g} s")
            finally:
                await cancel([scoring, replaced])


class _Run:
    """One run's parts, joined."""

    def __init__(self, config: Config, run_dir: Path, world: World, prompts: Data, eval_prompts: Data | None, agent: Any):
        self.config, self.world = config, world
        self.clock = VirtualClock()
        self.tracker = MemoryTracker()
        self._run_dir, self._data, self._eval_data, self._agent = run_dir, prompts, eval_prompts, agent
        self._begin_queue()
        self.engine = FakeInference(
            self.clock,
            token_seconds=world.token_seconds,
            num_tokens=world.num_tokens,
            failure=world.failure,
            max_running=world.max_running,
        )
        self._teacher = FakeTeacher(world.judge, seconds=world.judge_seconds)
        self.sync = SimulatedSync(self.clock, servers=world.servers, lag=world.lag, on_commit=self._committed)
        blocking = VirtualBlocking()
        self.trainer_engine = FakeTrainingEngine(blocking, step_seconds=world.step_seconds, outcome=world.outcome)
        self.workers = Workers(
            world.workers,
            front=lambda: self.front.service if self.front.is_up else None,
            reward=world.reward,
            score_seconds=world.score_seconds,
            lethal=world.lethal,
            back_after=world.back_after,
        )
        self.front = Row(self._make_front, seconds=world.call_seconds)
        self.rollouter = Row(self._make_rollouter, seconds=world.call_seconds)
        launcher = FakeLauncher(self.trainer_engine)
        self.trainer = TrainerService(
            config, run_dir, 0, launcher=launcher, connect=self._trainer_parts, clock=self.clock, run_blocking=blocking
        )
        self._front_receiver: LocalReceiver | None = None
        self._committed_by: dict[str, int] = {}
        self._in_traffic: list[str] = []
        self._version = 0
        self.checks = 0
        self.ledger.check, self.ledger.check_start = self._check_balance, self._check_admission

    async def to_the_end(self) -> Simulated:
        """As the supervisor has it: the run is over when trainer and rollouter are done, then the others are stopped."""
        await self.sync.start()
        async with asyncio.TaskGroup() as services:
            beside = [
                services.create_task(self.workers.run()),
                *(services.create_task(self._lose(loss)) for loss in self.world.losses),
            ]
            front = services.create_task(self.front.live({}))
            rollouter, trainer = services.create_task(self.rollouter.live({})), services.create_task(self.trainer.run({}))
            await asyncio.gather(rollouter, trainer)
            await cancel(beside)
            while not self.front.is_up:
                await self.front.began.wait()
            await self.front.service.stop()
            await front
        await self.sync.close()
        self._check_balance()
        self._end_queue()
        return Simulated(
            ledger=self.ledger,
            summary={each.name: each.summary() for each in (self.rollouter.service, self.front.service, self.trainer)},
            batches=self.trainer_engine.batches,
            metrics=self.tracker.records,
            unsettled=sum(len(self.queue.exchange.unsettled(topic)) for topic in (ROLLOUTS, SCORED)),
            checks=self.checks,
            seconds=self.clock.now(),
            lives={
                "rollouter": self.rollouter.lives,
                "reward": self.front.lives,
                **{name: worker.lives for name, worker in self.workers.by_address.items()},
            },
        )

    async def _lose(self, loss: Loss) -> None:
        await asyncio.sleep(loss.at)
        if loss.row in self.workers.by_address:
            self.workers.kill(loss.row, loss.back_after)
        elif loss.row == "rollouter":
            self.rollouter.kill(loss.back_after)
        else:
            assert loss.row == "reward", f"{loss.row} does not die here"
            self.front.kill(loss.back_after)

    def _begin_queue(self) -> None:
        """Queue and ledger: in memory, or, where the queue is durable, with their files."""
        config = self.config
        self._beginning: Beginning | None = None
        if config.queue.durability == "none":
            self.ledger = WatchedLedger()
            lease, members = config.queue.lease_seconds, config.members_per_group
            hooks = connect(self.ledger, topics_of(config), lease_seconds=lease, members_per_group=members)
        else:
            self._beginning = Beginning(config, self._run_dir, Fresh(incarnation=1), clock=self.clock)
            self.ledger = self._beginning.ledger = WatchedLedger()
            self._beginning.begin()
            hooks = self._beginning.queue
        self.queue = LocalQueue(hooks.exchange, clock=self.clock)

    def _end_queue(self) -> None:
        if self._beginning is not None:
            self.ledger.close()
            self._beginning.close()

    # Parts

    def _make_rollouter(self, lines: Lines) -> Rollouter:
        async def connect(book: AddressBook) -> RollouterParts:
            return self._rollouter_parts(lines)

        return Rollouter(self.config, connect, clock=self.clock)

    def _rollouter_parts(self, lines: Lines) -> RollouterParts:
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
            sender=LateSender(self.queue, ROLLOUTS, "rollouter", lines),
            ledger=lines.to(self.ledger),
            fleet=self.sync.fleet(),
            scorer=_Scorer(self.front),
            tracker=self.tracker,
            on_fleet=self._see_fleet,
            run_dir=self._run_dir,
            kept=self._kept(lines, "rollouter.jsonl"),
        )

    def _make_front(self, lines: Lines) -> RewardFront:
        return RewardFront(
            lambda book: self._front_parts(lines),
            min_scored=self.config.reward.min_scored,
            with_greedy=self.config.algorithm.advantage.needs.greedy,
            limit_seconds=self.config.reward.timeout_seconds,
            num_functions=len(self.config.reward.functions),
            max_worker_deaths=self.config.reward.max_worker_deaths,
            clock=self.clock,
            connect=self.workers.connect,
        )

    def _front_parts(self, lines: Lines) -> FrontParts:
        before, self._front_receiver = self._front_receiver, self.queue.receiver(ROLLOUTS)
        return FrontParts(
            receiver=MortalReceiver(self._front_receiver, lines, before),
            sender=LateSender(self.queue, SCORED, "reward", lines),
            ledger=lines.to(self.ledger),
            tracker=self.tracker,
            kept=self._kept(lines, "reward.jsonl"),
            teacher=self._teacher if self.config.algorithm.advantage.needs.teacher else None,
        )

    def _kept(self, lines: Lines, name: str) -> KeptFigures:
        """A file that a dead process writes no more."""
        kept = KeptFigures(self._run_dir / name)
        lines.on_cut(kept.close)
        return kept

    async def _trainer_parts(self, book: AddressBook, engine: TrainingEngine) -> TrainerParts:
        leader = LeaderParts(receiver=self.queue.receiver(SCORED), ledger=self.ledger, tracker=self.tracker)
        return TrainerParts(publisher=self.sync.publisher(), leader=leader)

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
        """live ≤ (min((v + 1 + η)·P, steps) − b)·G after every dispatch and restart, with v as it gives it."""
        training, attempts = self.config.training, self.ledger.attempts
        for group in groups:
            last_step = min(
                (group.start_version + 1 + self.config.rollout.staleness_limit) * training.publish_every, training.steps
            )
            live = len(attempts.live())
            allowed = (last_step - attempts.finished_steps) * training.groups_per_step
            assert live <= allowed, f"{live} groups live after the start of {group.id}, {allowed} allowed"

    def _check_balance(self) -> None:
        """The terms add up, and every live group is where the ledger says, or on its way there; while there is no rollouter, what
        it generated is nowhere."""
        self.checks += 1
        counts = self.ledger.attempts.counts()
        dispatched = counts.pop("dispatched")
        assert dispatched == sum(counts.values()), (dispatched, counts)
        exchange = self.queue.exchange
        queued = {item.group_id for item in exchange.unsettled(SCORED)}
        in_flight = {item.group_id for item in exchange.unsettled(ROLLOUTS)} | set(self.front.service.in_flight())
        in_flight |= set(self.rollouter.service.in_flight())
        is_led = self.rollouter.is_up and self.rollouter.service.status()["state"] not in ("starting", "resuming")
        for group in self.ledger.attempts.live():
            if group.state == "in_flight" and not is_led:
                continue
            assert str(group.id) in (queued if group.state == "queued" else in_flight), f"{group} is held by nobody"
        ended = {id for id in queued if GroupId.parse(id) not in self.ledger.attempts}
        assert not ended, f"the queue still holds {ended}, which have an end"
