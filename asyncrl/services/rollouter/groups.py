"""The groups that the rollouter answers for: what is live, what is not handed over yet, what has to be generated again. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.messages import GroupId
from asyncrl.protocols import End, LiveGroup, Prompt, ReturnedGroup


class Again(NamedTuple):
    """A prompt that is asked again, before any new row. `members`: those wanted. `returned`: an attempt that was dispatched, and
    is generated again as it was; else a reissue. `prompt`: where at hand, else the source finds it by the row."""

    id: GroupId
    members: tuple[int, ...]
    returned: bool
    prompt: Prompt | None


@dataclass
class _Live:
    """unsent: members whose trajectories the queue has not accepted yet. `prompt`: None for a group of an earlier life."""

    prompt: Prompt | None
    unsent: int


class GroupTable:
    """Invariants: a group is live from `start` until its end in the ledger, and while it is live it is in flight here until the
    queue has accepted every member. What is returned is not live, but in flight here too. Whatever has to be generated again is
    given out once: returned groups first, then reissues, each in order. members_per_group: samples and greedy response."""

    def __init__(self, members_per_group: int):
        self._every = tuple(range(members_per_group))
        self._live: dict[GroupId, _Live] = {}
        self._num_unsent = 0
        self._returned: dict[GroupId, tuple[int, ...]] = {}
        self._reissues: deque[tuple[GroupId, Prompt | None]] = deque()

    def restore(self, live: Iterable[LiveGroup], returned: Iterable[ReturnedGroup], owed: Iterable[GroupId]) -> None:
        """As an earlier life left it: every member of a live group is in other hands."""
        assert not self._live, "restored before anything starts"
        self._live = {group.id: _Live(None, 0) for group in live}
        self._returned = {group.id: group.missing for group in returned}
        self._reissues = deque((id, None) for id in owed)

    @property
    def live(self) -> int:
        """Groups without an end, returned ones aside."""
        return len(self._live)

    @property
    def num_in_flight(self) -> int:
        """Live groups with members that the queue has not accepted yet."""
        return self._num_unsent

    @property
    def num_waiting(self) -> int:
        """Returned groups and reissues that wait for admission."""
        return len(self._returned) + len(self._reissues)

    def in_flight(self) -> list[GroupId]:
        """Groups that this rollouter answers for: the queue lacks a member of theirs."""
        return [*self._returned, *(id for id, group in self._live.items() if group.unsent)]

    def start(self, id: GroupId, prompt: Prompt, members: int) -> None:
        """So many members of it are about to be generated."""
        assert id not in self._live, id
        self._live[id] = _Live(prompt, members)
        self._num_unsent += members > 0

    def accepted(self, id: GroupId) -> None:
        """The queue has accepted one more member. Members of a group that has ended meanwhile do not matter any more."""
        group = self._live.get(id)
        if group is None:
            return
        group.unsent -= 1
        assert group.unsent >= 0, id
        self._num_unsent -= not group.unsent

    def end(self, ends: Iterable[End]) -> list[GroupId]:
        """Ends as the ledger tells them. Returns the groups whose members need not be generated any more."""
        cut_short = []
        for end in ends:
            self._returned.pop(end.id, None)
            group = self._live.pop(end.id, None)
            if end.reissue:
                again = GroupId(end.id.epoch, end.id.row, end.id.attempt + 1)
                self._reissues.append((again, group.prompt if group else None))
            if group is not None and group.unsent:
                self._num_unsent -= 1
                cut_short.append(end.id)
        return cut_short

    def next_again(self) -> Again | None:
        """What comes before any new row; it has to be started now."""
        if self._returned:
            id = next(iter(self._returned))
            return Again(id, self._returned.pop(id), returned=True, prompt=None)
        if self._reissues:
            id, prompt = self._reissues.popleft()
            return Again(id, self._every, returned=False, prompt=prompt)
        return None
