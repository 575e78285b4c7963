"""Scored groups in, steps out: receives, keeps what is not picked yet, and records what leaves before a step."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.clock import Clock, IdleMeter
from asyncrl.errors import RunError, StreamClosed
from asyncrl.messages import GroupId, ScoredGroup
from asyncrl.messages.id_sets import RecentIds
from asyncrl.protocols import End
from asyncrl.scheduling.selection import Candidate, Leaving, Selector, candidate_of
from asyncrl.services.trainer.figures import Measure
from asyncrl.services.trainer.parts import LeaderParts
from asyncrl.services.trainer.tally import WAITING_FOR_DATA

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5  # longest wait for an arrival before the other ranks get a sign of life and `stop` is looked at
NOTHING_EXPIRED = Measure()
REMEMBERED = 65_536  # ids of groups that were taken, to drop a second delivery: far more than one can be late by


@dataclass(frozen=True)
class Taken:
    """A step's groups; how many left before it, by state, and what those that expired were like."""

    groups: tuple[tuple[Candidate, ScoredGroup], ...]
    left_before: Counter[str]
    expired: Measure = NOTHING_EXPIRED

    def in_order(self, key: Callable[[GroupId], Any]) -> Taken:
        return replace(self, groups=tuple(sorted(self.groups, key=lambda pair: key(pair[0].id))))


class Intake:
    """Every group that arrives is in the selector's pool, or has an end in the ledger, or is in exactly one step."""

    def __init__(
        self,
        selector: Selector,
        parts: LeaderParts,
        *,
        clock: Clock,
        meter: IdleMeter,
        tick: Callable[[], Awaitable[None]],
        stopping: asyncio.Event,
        data_timeout_seconds: float,
    ):
        self._selector, self._parts, self._clock, self._meter = selector, parts, clock, meter
        self._tick, self._stopping, self._data_timeout_seconds = tick, stopping, data_timeout_seconds
        self._held: dict[GroupId, ScoredGroup] = {}
        self._seen = RecentIds(REMEMBERED)
        self._left: Counter[str] = Counter()
        self._expired = NOTHING_EXPIRED
        self._closed = False

    async def next_step(self, finished_steps: int) -> Taken | None:
        """The next step's groups, or None when the data has ended or a stop was asked. Raises RunError when no group arrives for
        training.data_timeout_seconds."""
        heard = self._clock.now()
        while not self._stopping.is_set():
            coming = await self._coming()
            decision = self._selector.decide(finished_steps, coming=coming, closed=self._closed)
            await self._record(decision.leaving)
            if decision.taken is not None:
                left, self._left = self._left, Counter()
                expired, self._expired = self._expired, NOTHING_EXPIRED
                return Taken(tuple((candidate, self._held.pop(candidate.id)) for candidate in decision.taken), left, expired)
            if self._closed:
                return None
            reason = "an older group" if decision.out_of_order else WAITING_FOR_DATA
            if await self._receive(reason):
                heard = self._clock.now()
            elif self._clock.now() - heard > self._data_timeout_seconds:
                raise RunError(await self._what_is_missing(decision.out_of_order))
        return None

    def held(self) -> list[GroupId]:
        """Groups that arrived, and are in no step yet."""
        return list(self._held)

    async def _receive(self, reason: str) -> bool:
        """Take what is there, waiting up to a tick; whether anything came."""
        try:
            with self._meter.waiting(reason):
                deliveries = await self._parts.receiver.receive(max_items=self._selector.wanted(), timeout=TICK_SECONDS)
        except StreamClosed:
            log.info("the data has ended; %d groups are here", len(self._selector))
            self._closed = True
            return True
        for delivery in deliveries:
            assert isinstance(delivery.message, ScoredGroup), "topic scored carries scored groups"
            self._accept(delivery.message)
        if not deliveries:
            await self._tick()
        return bool(deliveries)

    def _accept(self, group: ScoredGroup) -> None:
        if group.id in self._seen:
            log.info("group %s came a second time: dropped", group.id)
            return
        self._seen.add(group.id)
        self._held[group.id] = group
        self._selector.add(candidate_of(group))

    async def _coming(self) -> list[int]:
        """Start versions of the live groups that are not here; asked only where a pick may depend on them."""
        rules = self._selector.rules
        enough = len(self._selector) >= rules.groups_per_step or rules.filter == "refill"
        if rules.on_stale != "wait" or self._closed or not enough:
            return []
        with self._meter.waiting("ledger"):
            live = await self._parts.ledger.live()
        return [group.start_version for group in live if group.id not in self._selector]

    async def _record(self, leaving: tuple[Leaving, ...]) -> None:
        if not leaving:
            return
        for each in leaving:
            group = self._held.pop(each.id)
            self._left[each.state] += 1
            if each.state == "expired":
                self._expired += Measure.of([group])
        with self._meter.waiting("ledger"):
            await self._parts.ledger.end([End(each.id, each.state, each.reason, each.reissue) for each in leaving])

    async def _what_is_missing(self, out_of_order: bool) -> str:
        rules, here = self._selector.rules, len(self._selector)
        live = [group for group in await self._parts.ledger.live() if group.id not in self._selector]
        lacks = (
            "an older group that must train first (rollout.on_stale is wait)"
            if out_of_order
            else f"{max(0, rules.groups_per_step - here)} of {rules.groups_per_step} scored groups (training.groups_per_step)"
        )
        if live:
            names = ", ".join(f"{group.id} ({group.state.replace('_', ' ')})" for group in live[:3])
            where = f"{len(live)} groups are on their way, the oldest {names}: see the logs of inference, rollouter and reward"
        else:
            where = "no group is on its way: see the log of the rollouter"
        seconds = self._data_timeout_seconds
        return f"no scored group arrived for {seconds:.0f} s (training.data_timeout_seconds); the step lacks {lacks}; {where}"
