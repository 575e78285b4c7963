"""Samples to scores: the one thing that a reward worker needs to know of this room.

    samples ─▶ FunctionExecutor ─┬─ ready-made functions: called here (they are pure, and cost microseconds)
                                 ├─ sync functions:  SerialLane ─▶ child process
                                 └─ async functions: ConcurrentLane ─▶ child process        + one spare child, warm

User functions never run in the worker's own process: a function that hangs, holding the interpreter's lock or not, cannot be
stopped from inside, but its process can be killed. The child is killed at the limit and replaced by the spare, so the worker
itself needs neither signals nor a restart. Memory: each child imports what the user's module imports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.config.components import component_names
from asyncrl.rewards.function import FIELDS, FunctionSpec, RewardFunction
from asyncrl.rewards.lanes import Call, ConcurrentLane, LaneCounts, SerialLane
from asyncrl.rewards.nursery import LoadedFunction, Nursery
from asyncrl.rewards.outcome import (
    CallOutcome,
    Item,
    SampleScore,
    combine,
    failed,
    outcome_of,
    raised,
)

NOT_CALLED = failed("not called")


class Executor(Protocol):
    """Runs every reward function on samples."""

    async def start(self) -> None:
        """Load the functions. Raises UserError when one cannot be used."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a sample that some function takes; the others need not travel."""

    @property
    def is_serial(self) -> bool:
        """Whether samples are run one after the other."""

    async def run(self, items: Sequence[Item]) -> list[SampleScore]:
        """One score a sample, in order, within a bounded time."""

    async def close(self) -> None:
        """End what was started."""

    def counts(self) -> dict[str, int]:
        """Calls made, children killed for a timeout, children that died."""


class FunctionExecutor:
    """The real one. output: the file that takes what the functions print, and the trace of one that crashes its process;
    load_seconds: for a child process to load them."""

    def __init__(
        self,
        specs: Sequence[FunctionSpec],
        weights: Sequence[float],
        *,
        limit_seconds: float,
        concurrency: int,
        output: Path | None = None,
        load_seconds: float = 120.0,
    ):
        self._load_seconds = load_seconds
        self._specs, self._weights, self._limit, self._concurrency = list(specs), list(weights), limit_seconds, concurrency
        self._names = component_names([spec.name for spec in specs])
        self._own: dict[int, RewardFunction] = {}
        self._loaded: dict[int, LoadedFunction] = {}
        self._child_index: dict[int, int] = {}
        self._output = output
        self._counts = LaneCounts()
        self._nursery: Nursery | None = None
        self._serial: SerialLane | None = None
        self._concurrent: ConcurrentLane | None = None

    async def start(self) -> None:
        self._own = {index: spec.load() for index, spec in enumerate(self._specs) if spec.is_ready_made}
        theirs = [index for index in range(len(self._specs)) if index not in self._own]
        if not theirs:
            return
        self._child_index = {index: position for position, index in enumerate(theirs)}
        specs = [self._specs[index] for index in theirs]
        self._nursery = Nursery(specs, self._limit, self._output, load_seconds=self._load_seconds)
        self._loaded = dict(zip(theirs, await self._nursery.first(), strict=True))
        self._serial = SerialLane(self._nursery, self._limit, self._counts)
        self._concurrent = ConcurrentLane(self._nursery, self._limit, self._concurrency, self._counts)

    @property
    def fields(self) -> tuple[str, ...]:
        parts: list[RewardFunction | LoadedFunction] = [*self._own.values(), *self._loaded.values()]
        taken = {field for part in parts for field in part.accepts}
        return tuple(field for field in FIELDS if field in taken)

    @property
    def is_serial(self) -> bool:
        return not any(function.is_async for function in self._loaded.values())

    async def run(self, items: Sequence[Item]) -> list[SampleScore]:
        outcomes: list[list[CallOutcome]] = [[NOT_CALLED] * len(self._specs) for _ in items]
        for index, function in self._own.items():
            for row, item in zip(outcomes, items, strict=True):
                row[index] = _call(function, item)
        if self._loaded:
            await self._in_children(items, outcomes)
        return [combine(self._names, self._weights, row) for row in outcomes]

    async def _in_children(self, items: Sequence[Item], outcomes: list[list[CallOutcome]]) -> None:
        lanes: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # is_async to (sample, function)
        for sample in range(len(items)):
            for index, loaded in self._loaded.items():
                lanes[loaded.is_async].append((sample, index))
        await asyncio.gather(*(self._through(lane, places, items, outcomes) for lane, places in lanes.items() if places))

    async def _through(self, is_async: bool, places: list[tuple[int, int]], items: Sequence[Item], outcomes: Any) -> None:
        lane = self._concurrent if is_async else self._serial
        assert lane is not None, "run before start"
        results = await lane.run([self._call_of(index, items[sample]) for sample, index in places])
        for (sample, index), outcome in zip(places, results, strict=True):
            outcomes[sample][index] = outcome

    def _call_of(self, index: int, item: Item) -> Call:
        accepts = self._loaded[index].accepts
        return self._child_index[index], {field: item.get(field) for field in accepts}

    async def close(self) -> None:
        if self._concurrent is not None:
            await self._concurrent.close()
        if self._nursery is not None:
            await self._nursery.close()

    def counts(self) -> dict[str, int]:
        return {"calls": self._counts.calls, "killed": self._counts.killed, "died": self._counts.died}


def _call(function: RewardFunction, item: Item) -> CallOutcome:
    try:
        return outcome_of(function(item))
    except Exception as error:  # boundary: whatever a sample's values make of a ready-made function is that sample's failure
        return raised(error)
