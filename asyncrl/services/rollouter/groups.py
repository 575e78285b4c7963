"""The groups that the rollouter has started: what is live, what is not handed over yet, what has to be issued again. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncrl.messages import GroupId
from asyncrl.protocols import End, Prompt


@dataclass
class _Live:
    """unsent: members whose trajectories the queue has not accepted yet."""

    prompt: Prompt
    unsent: int


class GroupTable:
    """Invariants: a group is live from `start` until its end in the ledger, and while it is live it is in flight here until
    the queue has accepted every member. A reissue waits in order and is given out once."""

    def __init__(self, group_size: int):
        self._group_size = group_size
        self._live: dict[GroupId, _Live] = {}
        self._num_unsent = 0
        self._reissues: deque[tuple[GroupId, Prompt]] = deque()

    @property
    def live(self) -> int:
        """Groups without an end."""
        return len(self._live)

    @property
    def num_in_flight(self) -> int:
        return self._num_unsent

    @property
    def reissues_waiting(self) -> int:
        return len(self._reissues)

    def in_flight(self) -> list[GroupId]:
        """Live groups with members that the queue has not accepted yet."""
        return [id for id, group in self._live.items() if group.unsent]

    def start(self, id: GroupId, prompt: Prompt) -> None:
        assert id not in self._live, id
        self._live[id] = _Live(prompt, self._group_size)
        self._num_unsent += 1

    def accepted(self, id: GroupId) -> None:
        """The queue has accepted one more member. Members of a group that has ended meanwhile do not matter any more."""
        group = self._live.get(id)
        if group is None:
            return
        group.unsent -= 1
        assert group.unsent >= 0, id
        self._num_unsent -= not group.unsent

    def end(self, ends: Iterable[End], row: Callable[[int], Prompt]) -> list[GroupId]:
        """Ends as the ledger tells them; `row` finds the prompt of a group that this rollouter did not start. Returns those whose
        members need not be generated any more."""
        cut_short = []
        for end in ends:
            group = self._live.pop(end.id, None)
            if end.reissue:
                prompt = group.prompt if group else row(end.id.row)
                self._reissues.append((GroupId(end.id.epoch, end.id.row, end.id.attempt + 1), prompt))
            if group is not None and group.unsent:
                self._num_unsent -= 1
                cut_short.append(end.id)
        return cut_short

    def next_reissue(self) -> tuple[GroupId, Prompt] | None:
        """The oldest one; it has to be started now."""
        return self._reissues.popleft() if self._reissues else None
