"""Admission: what starts next, and why nothing does. The rules are `scheduling.admission`; here they meet prompts and ledger.

returned groups ─┐
owed reissues ───┼─▶ (bound, places) ─▶ ledger: restart, dispatch ─▶ Generation
prompt source ───┘                        └─ prompts in quarantine: end
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.data import check_prompt
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, LedgerClient, Prompt, PromptSource, Tokenizer
from asyncrl.scheduling.admission import groups_that_fit, may_start, places_left_for_evaluation
from asyncrl.services.rollouter.generation import Generation, Places, StartedGroup
from asyncrl.services.rollouter.groups import GroupTable
from asyncrl.services.rollouter.quarantine import Sickbay


class Standing(NamedTuple):
    """is_open: groups may start at all; confirmed: the version that every server taking traffic has, None where none does;
    staleness_bound: η now."""

    is_open: bool
    confirmed: int | None
    finished_steps: int
    staleness_bound: int


class Admission:
    """`standing()` says where the run is at that moment."""

    def __init__(
        self,
        config: Config,
        *,
        source: PromptSource,
        tokenizer: Tokenizer,
        ledger: LedgerClient,
        groups: GroupTable,
        quarantine: Sickbay,
        generation: Generation,
        places: Places,
        standing: Callable[[], Standing],
    ):
        self._config, self._source, self._tokenizer, self._ledger = config, source, tokenizer, ledger
        self._groups, self._quarantine, self._generation, self._places = groups, quarantine, generation, places
        self._standing = standing
        self.data_ended = False

    async def start_groups(self, tasks: asyncio.TaskGroup) -> int:
        """Tell the ledger of all groups that may start now, one call a kind, and begin to generate them. Returns how many. One
        whose prompt is in quarantine ends at once."""
        rollout = self._config.rollout
        self._quarantine.check(self._source.num_rows)
        fit = groups_that_fit(self._places.free, self._config.members_per_group, rollout.max_concurrent)
        started = self._draw(min(self.startable, fit))
        if not started:
            return 0
        refused = [End(group.id, "failed", reason) for group in started if (reason := self._quarantine.reason(group.id.row))]
        kept_out = {end.id for end in refused}
        generated = [group for group in started if group.id not in kept_out and group.members]
        for group in started:
            self._groups.start(group.id, group.prompt, len(group.members))
        for group in generated:
            self._generation.reserve(group)
        await self._record(started)
        if refused:
            await self._ledger.end(refused)
        for group in generated:
            self._generation.start(group, tasks)
        return len(started)

    @property
    def startable(self) -> int:
        """Groups that the bound lets start, places and data aside."""
        config, now = self._config, self._standing()
        if not now.is_open:
            return 0
        return may_start(
            now.confirmed,
            now.staleness_bound,
            config.training.publish_every,
            now.finished_steps,
            config.training.steps,
            config.training.groups_per_step,
            self._groups.live,
        )

    @property
    def room_for_evaluation(self) -> int:
        """Places that no group waits for."""
        wanted = min(self.startable, self._groups.num_waiting) if self.data_ended else self.startable
        return places_left_for_evaluation(self._places.free, wanted, self._config.members_per_group)

    @property
    def nothing_will_come(self) -> bool:
        """The data has ended and every member is handed over. Where groups may be issued again, the trainer is first let
        take what makes a whole batch; a group that expires in the last, partial one is not issued again."""
        if not self.data_ended or self._groups.num_in_flight or self._groups.num_waiting:
            return False
        return self._config.rollout.on_stale != "reissue" or self._groups.live < self._config.training.groups_per_step

    @property
    def why_waiting(self) -> str:
        """The reason under which admission waits, and idle time is booked."""
        now = self._standing()
        if self.data_ended and not self._groups.num_waiting:
            return "end of data"
        if now.confirmed is None:
            return "no server"
        if self.startable:
            return "places"
        wanted = (self._config.training.steps - now.finished_steps) * self._config.training.groups_per_step
        return "last steps" if self._groups.live >= wanted else "staleness bound"

    def _draw(self, count: int) -> list[StartedGroup]:
        """Returned groups, then reissues, then new rows."""
        drawn: list[StartedGroup] = []
        while len(drawn) < count:
            if again := self._groups.next_again():
                prompt = again.prompt or self._source.row(again.id.row)
                drawn.append(self._prepared(again.id, prompt, again.members, returned=again.returned))
            elif not self.data_ended and (row := self._source.next()) is not None:
                epoch, prompt = row
                drawn.append(self._prepared(GroupId(epoch, prompt.row, 0), prompt, range(self._config.members_per_group)))
            else:
                self.data_ended = True
                break
        return drawn

    def _prepared(self, id: GroupId, prompt: Prompt, members: Sequence[int], *, returned: bool = False) -> StartedGroup:
        """Raises UserError for a prompt that this run has no room for."""
        rollout, confirmed = self._config.rollout, self._standing().confirmed
        tokens = np.asarray(self._tokenizer.encode_prompt(prompt.prompt), np.int32)
        check_prompt(
            prompt,
            len(tokens),
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            key="data.train",
        )
        assert confirmed is not None, "nothing starts before a version is confirmed"
        return StartedGroup(id, prompt, tokens, confirmed, tuple(members), returned)

    async def _record(self, started: Sequence[StartedGroup]) -> None:
        """The groups stand in the ledger when this returns; returned ones again."""
        if again := [Dispatch(group.id, group.start_version) for group in started if group.returned]:
            await self._ledger.restart(again)
        if new := [Dispatch(group.id, group.start_version) for group in started if not group.returned]:
            await self._ledger.dispatch(new, self._source.cursor())
