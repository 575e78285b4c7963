"""A small world around the selector: admission by its bound, generation of any length, versions confirmed late, failures, equal
rewards; one random run of it per seed. Everything that the rules promise is asserted as it happens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from asyncrl.messages import GroupId
from asyncrl.scheduling.admission import may_start
from asyncrl.scheduling.selection import Candidate, SelectionRules, Selector, split_filtered


@dataclass
class Flying:
    start_version: int
    left: int  # ticks until it arrives
    versions: list[int] = field(default_factory=list)  # of its tokens so far


class World:
    """`run` plays until `steps` steps are made. `lag`: most ticks from a publish to its confirmation; `slow`: half of the
    groups take ten times as long; `admits`: False breaks admission's promise."""

    def __init__(self, rules: SelectionRules, *, steps: int, seed: int, lag: int = 3, slow: bool = False, admits: bool = True):
        self.rules, self.steps, self.lag, self.slow, self.admits = rules, steps, lag, slow, admits
        self.random = random.Random(seed)
        self.selector = Selector(rules)
        self.finished = 0
        self.confirmed: int | None = 0
        self.pending: list[tuple[int, int]] = []  # (ticks left, version)
        self.flying: dict[GroupId, Flying] = {}
        self.arrived: dict[GroupId, Candidate] = {}
        self.ended: dict[GroupId, str] = {}
        self.owed: list[GroupId] = []
        self.next_row = 0
        self.sizes: list[int] = []
        self.waited_out_of_order = 0

    @property
    def live(self) -> int:
        return len(self.flying) + len(self.arrived)

    def run(self) -> World:
        for _ in range(400 * self.steps):
            if self.finished == self.steps:
                return self
            self.tick()
        raise AssertionError(f"stuck after {self.finished} steps: {len(self.flying)} flying, {len(self.arrived)} here")

    def tick(self) -> None:
        self.confirm()
        self.admit()
        self.generate()
        self.train()

    def confirm(self) -> None:
        self.pending = [(left - 1, version) for left, version in self.pending]
        self.confirmed = max([self.confirmed or 0, *(version for left, version in self.pending if left <= 0)])
        self.pending = [(left, version) for left, version in self.pending if left > 0]

    def admit(self) -> None:
        rules = self.rules
        room = may_start(
            self.confirmed, rules.max_staleness, rules.publish_every, self.finished, self.steps, rules.groups_per_step, self.live
        )
        if not self.admits:
            room = 3 * rules.groups_per_step
        for _ in range(self.random.randint(0, room)):
            if self.owed:
                id = self.owed.pop(0)
            else:
                id, self.next_row = GroupId(0, self.next_row, 0), self.next_row + 1
            ticks = self.random.randint(1, 4) * (10 if self.slow and id.row % 2 else 1)
            self.flying[id] = Flying(self.confirmed or 0, ticks)

    def generate(self) -> None:
        for id, group in list(self.flying.items()):
            group.versions.append(self.random.randint(self.confirmed or 0, self.rules.version(self.finished)))
            group.left -= 1
            if group.left > 0:
                continue
            del self.flying[id]
            if self.random.random() < 0.05:
                self.ended[id] = "failed"
                continue
            known = [] if self.random.random() < 0.02 else group.versions
            candidate = Candidate(id, min(known, default=None), max(known, default=None), self.random.random() < 0.2)
            self.arrived[id] = candidate
            self.selector.add(candidate)

    def train(self) -> None:
        coming = [group.start_version for group in self.flying.values()]
        decision = self.selector.decide(self.finished, coming=coming)
        for leaving in decision.leaving:
            self.end(leaving.id, leaving.state)
            if leaving.reissue:
                assert self.rules.on_stale == "reissue"
                self.owed.append(leaving.id._replace(attempt=leaving.id.attempt + 1))
        self.waited_out_of_order += decision.out_of_order
        if decision.taken is None:
            return
        self.check_bound(decision.taken)
        trains, filtered = split_filtered(decision.taken, self.rules.filter)
        for candidate in trains:
            self.end(candidate.id, "trained")
        for candidate, _ in filtered:
            self.end(candidate.id, "filtered")
        self.sizes.append(len(decision.taken))
        self.finished += 1
        if self.finished % self.rules.publish_every == 0:
            self.pending.append((self.random.randint(1, self.lag), self.rules.version(self.finished)))

    def check_bound(self, taken: tuple[Candidate, ...]) -> None:
        assert len(taken) <= self.rules.groups_per_step
        version = self.rules.version(self.finished)
        for candidate in taken:
            youngest = candidate.newest if self.rules.on_stale == "mask" else candidate.oldest
            assert youngest is None or version - youngest <= self.rules.max_staleness, f"{candidate} trains at version {version}"

    def end(self, id: GroupId, state: str) -> None:
        assert id not in self.ended, f"{id} ends twice"
        del self.arrived[id]
        self.ended[id] = state
