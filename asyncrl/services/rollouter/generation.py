"""Generating dispatched groups, each in a task of its own, within the places that all share.

Where the advantage needs one, the last member of a group is its greedy response: the agent makes it like the samples and beside
them, at temperature 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.agents import Agent, Task
from asyncrl.config.schema import Config
from asyncrl.messages import GroupId, Trajectory
from asyncrl.protocols import Prompt, SamplingParams
from asyncrl.scheduling.admission import parts_of_group
from asyncrl.services.tasks import all_to_end


class Places:
    """rollout.max_concurrent, as places: one per trajectory being generated. `taken` never passes `total`. Rollouts and
    evaluation share them; who may take how many is decided by `scheduling.admission`. `on_change(taken)` is told of every
    change."""

    def __init__(self, total: int, on_change: Callable[[int], None] = lambda taken: None):
        self.total = total
        self.taken = 0
        self._on_change = on_change

    @property
    def free(self) -> int:
        return self.total - self.taken

    def take(self, places: int) -> None:
        self.taken += places
        assert self.taken <= self.total, (self.taken, self.total)
        self._on_change(self.taken)

    def give(self, places: int) -> None:
        if places:
            self.taken -= places
            assert self.taken >= 0, self.taken
            self._on_change(self.taken)


class StartedGroup(NamedTuple):
    """A group that is about to stand in the ledger. prompt_tokens int32[P]; members: those to generate, all but where `returned`,
    an attempt that stands there already and has lost these."""

    id: GroupId
    prompt: Prompt
    prompt_tokens: npt.NDArray[np.int32]
    start_version: int
    members: tuple[int, ...]
    returned: bool = False


class Generation:
    """Members are handed to `finished` as soon as they are there. A group larger than all places runs in parts, one after the
    other."""

    def __init__(self, config: Config, agent: Agent, places: Places, finished: Callable[[Sequence[Trajectory]], None]):
        self._config, self._agent, self._places, self._finished = config, agent, places, finished
        self._tasks: dict[GroupId, asyncio.Task[None]] = {}
        self._held: dict[GroupId, int] = {}  # places of each group that still has them
        rollout = config.rollout
        self._sampling = SamplingParams(rollout.max_response_tokens, rollout.temperature, rollout.top_p, rollout.top_k)

    def reserve(self, group: StartedGroup) -> None:
        """Take the places of a group that is about to be dispatched."""
        self._held[group.id] = len(self._parts(group)[0])
        self._places.take(self._held[group.id])

    def start(self, group: StartedGroup, tasks: asyncio.TaskGroup) -> None:
        """Begin to generate a reserved group, unless it was cut short already."""
        if group.id in self._held:
            task = tasks.create_task(self._generate(group), name=f"group {group.id}")
            self._tasks[group.id] = task
            task.add_done_callback(lambda _: self.cut_short(group.id))

    def cut_short(self, id: GroupId) -> None:
        """No further member is needed, and the group's places are free."""
        if task := self._tasks.pop(id, None):
            task.cancel()
        self._places.give(self._held.pop(id, 0))

    async def _generate(self, group: StartedGroup) -> None:
        parts = self._parts(group)
        for part in parts:
            is_last = part is parts[-1]
            self._give(group.id, self._held[group.id] - len(part) if is_last else 0)
            asked = self._asked(group, part)
            if len(asked) == 1:
                await self._run(asked[0], gives=is_last)
            else:
                await all_to_end(*(self._run(task, gives=is_last) for task in asked))

    async def _run(self, task: Task, *, gives: bool) -> None:
        """gives: the place of each member that is there is free from then on."""
        async with aclosing(self._agent.run(task)) as finished:
            async for trajectories in finished:
                self._finished(trajectories)
                self._give(task.id, len(trajectories) if gives else 0)

    def _asked(self, group: StartedGroup, members: tuple[int, ...]) -> list[Task]:
        """What the agent is asked for: the samples together, the greedy response by itself."""
        greedy = self._config.rollout.group_size
        samples = tuple(member for member in members if member != greedy)
        sampled, at_zero = self._sampling, replace(self._sampling, temperature=0.0)
        asked = [(samples, sampled), ((greedy,) if greedy in members else (), at_zero)]
        return [self._task(group, wanted, sampling) for wanted, sampling in asked if wanted]

    def _parts(self, group: StartedGroup) -> list[tuple[int, ...]]:
        """Its members, cut so that each part has a place for each of its own."""
        if len(group.members) <= self._places.total:
            return [group.members]
        places = parts_of_group(len(group.members), self._places.total)
        return [tuple(group.members[place] for place in part) for part in places]

    def _give(self, id: GroupId, places: int) -> None:
        if id in self._held:  # else cut short, and the places are free already
            self._held[id] -= places
            self._places.give(places)

    def _task(self, group: StartedGroup, members: tuple[int, ...], sampling: SamplingParams) -> Task:
        rollout, own = self._config.rollout, group.prompt.sampling
        return Task(
            id=group.id,
            group_size=rollout.group_size,
            members=members,
            start_version=group.start_version,
            prompt=group.prompt,
            prompt_tokens=group.prompt_tokens,
            sampling=replace(sampling, **own) if own else sampling,
            max_response_tokens=rollout.max_response_tokens,
            run_seed=self._config.seed,
            timeout_seconds=rollout.request_timeout_seconds,
            retries=rollout.generation_retries,
        )
