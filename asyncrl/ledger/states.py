"""The states of a prompt group's attempts, as a pure state machine.

    (nothing) ─dispatched─▶ in flight ─▶ queued ─┬─▶ trained, filtered       ends: exactly one per attempt, with a reason
                              ▲ │ │        │ ▲   └─▶ failed, expired ◀─┐
                    restarted │ │ └────────┼─┼─────────────────────────┤
                              │ ▼ its data ▼ │ is lost                 │
                              returned: generated again, as it was ────┘

Invariants, kept by refusing what would break them (`IllegalTransition`, and then nothing has changed):
- an attempt is dispatched once; attempt 0 by the prompt order, attempt n + 1 only after attempt n ended with `reissue`;
- an attempt ends once, and only an attempt that was queued trains or is filtered;
- steps are finished in order, each once, and none after training is over;
- once training is over nothing is live: what was live then, and what starts later, has failed with `TRAINING_OVER`;
- what already stands so may be said again (a caller that got no answer does): it changes nothing, and is no error.
So at any instant dispatched = trained + filtered + failed + expired + in flight + queued, in attempts; returned ones count as in
flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from asyncrl.errors import IllegalTransition, LedgerError
from asyncrl.messages import GroupId
from asyncrl.messages.id_sets import IdSet
from asyncrl.protocols.ledger import Dispatch, End, LedgerEvents, LiveGroup, PromptCursor, StepRecord

State = Literal["dispatched", "queued", "trained", "filtered", "failed", "expired", "returned", "restarted"]
STATES: tuple[State, ...] = ("dispatched", "queued", "trained", "filtered", "failed", "expired", "returned", "restarted")
END_STATES: tuple[State, ...] = ("trained", "filtered", "failed", "expired")
SUCCESSORS: dict[State | None, tuple[State, ...]] = {
    None: ("dispatched",),
    "dispatched": ("queued", "failed", "expired", "returned"),
    "queued": ("trained", "filtered", "failed", "expired", "returned"),
    "returned": ("restarted", "queued", "failed", "expired"),
    "restarted": ("queued", "failed", "expired", "returned"),
    "trained": (),
    "filtered": (),
    "failed": (),
    "expired": (),
}
TRAINING_OVER = "training is over"
EVENTS_KEPT = 4096  # more than happen between two calls of `watch`; who missed some is told all
REASONS_KEPT = 100
REASON_CHARACTERS = 500


class Transition(NamedTuple):
    """One row of history. `version`: confirmed at dispatch or restart, the trainer's in a step; `step`: of an end in a step."""

    id: GroupId
    state: State
    reason: str = ""
    step: int | None = None
    version: int | None = None


class FinishedStep(NamedTuple):
    """`taken` groups ended in this step, whatever their end; `staleness_bound` is admission's from here on, None where it is
    fixed."""

    step: int
    version: int
    taken: int
    staleness_bound: int | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """What one call changed: it stands in the file whole or not at all."""

    transitions: Sequence[Transition] = ()
    reissues: Sequence[GroupId] = ()
    cursor: PromptCursor | None = None
    step: FinishedStep | None = None
    final_version: int | None = None

    def __bool__(self) -> bool:
        changed = self.transitions or self.reissues or self.cursor or self.step
        return bool(changed) or self.final_version is not None


class Attempts:
    """Every attempt's state. Live attempts are held one by one, ended ones as bits: memory grows with what is live."""

    def __init__(self) -> None:
        self._live: dict[GroupId, LiveGroup] = {}  # in order of dispatch
        self._seen = IdSet()
        self._ends: dict[State, IdSet] = {state: IdSet() for state in END_STATES}
        self._asked = IdSet()  # reissues
        self._cut = IdSet()
        self._owed: dict[GroupId, None] = {}
        self._last_step: tuple[FinishedStep, dict[GroupId, State]] | None = None
        self._events: deque[End | None] = deque()
        self._first_event = 0
        self._ended: dict[State, int] = dict.fromkeys(END_STATES, 0)
        self._queued = self._returned = 0
        self.dispatched = 0
        self.finished_steps = 0
        self.staleness_bound: int | None = None
        self.final_version: int | None = None
        self.cursor: PromptCursor | None = None
        self.reasons: dict[str, int] = {}
        self.failures_by_row: dict[int, int] = {}

    # What may happen

    def dispatch(self, groups: Sequence[Dispatch], cursor: PromptCursor) -> Changes:
        """These groups start, and the prompt source stands at `cursor`."""
        if groups and all(map(self._stands_dispatched, groups)):
            return Changes()  # said again: the source may have gone on since
        fresh = set()
        for group in groups:
            if group.id in self._seen or group.id in fresh:
                raise IllegalTransition(f"group {group.id} was dispatched before: an attempt starts once")
            if group.id.attempt and group.id not in self._owed:
                raise IllegalTransition(f"group {group.id} is a reissue that nobody asked for: end its predecessor with reissue")
            fresh.add(group.id)
        transitions = [Transition(group.id, "dispatched", version=group.start_version) for group in groups]
        if self.final_version is not None:
            transitions += [Transition(group.id, "failed", TRAINING_OVER) for group in groups]
        return self._made(Changes(transitions, cursor=cursor))

    def queue(self, ids: Sequence[GroupId]) -> Changes:
        """The scored groups of these attempts were accepted by the queue."""
        for id in ids:
            self._check(id, "queued")
        if len(set(ids)) < len(ids):
            raise IllegalTransition(f"a group is queued twice in one call: {', '.join(map(str, ids))}")
        return self._made(Changes([Transition(id, "queued") for id in ids]))

    def take_back(self, ids: Iterable[GroupId], reason: str) -> Changes:
        """The data of these live attempts is lost: they are returned, if they are not so already."""
        transitions = [Transition(id, "returned", reason) for id in ids if self.state(id) != "returned"]
        for transition in transitions:
            self._check(transition.id, "returned")
        return self._made(Changes(transitions))

    def restart(self, groups: Sequence[Dispatch]) -> Changes:
        """These returned attempts passed admission again. One that is queued, in flight or has ended by now is passed over."""
        if unknown := [str(group.id) for group in groups if self.state(group.id) == "unknown"]:
            raise IllegalTransition(f"group {unknown[0]} cannot be restarted: it was never dispatched")
        again = {group.id: group.start_version for group in groups if self.state(group.id) == "returned"}
        return self._made(Changes([Transition(id, "restarted", version=version) for id, version in again.items()]))

    def end(self, ends: Sequence[End]) -> Changes:
        """Ends outside a step: failed, expired at the pick, filtered and replaced under refill. A group that was cut short, or
        that had ended when training was over, is passed over: its holder could not know."""
        ends = [end for end in ends if not self._stands_ended(end)]
        for end in ends:
            if end.state == "trained":
                raise IllegalTransition(f"group {end.id} cannot train outside a step: name it in finish_step")
        self._check_ends(ends)
        return self._made(Changes([Transition(end.id, end.state, plain_text(end.reason)) for end in ends], _reissues(ends)))

    def cut_short(self, ends: Sequence[End]) -> Changes:
        """Ends that the groups' holders did not ask for and have yet to hear of."""
        changes = self.end(ends)
        for transition in changes.transitions:
            self._cut.add(transition.id)
        return changes

    def finish_step(self, record: StepRecord) -> Changes:
        """The next step is finished, and every group that it took has ended."""
        if self._stands_finished(record):
            return Changes()
        if record.step != self.finished_steps + 1:
            raise IllegalTransition(f"step {record.step} cannot finish: {self.finished_steps} steps are finished")
        if self.final_version is not None:
            raise IllegalTransition(f"step {record.step} cannot finish: training is over")
        self._check_ends(record.ends)
        return self._made(
            Changes(
                [Transition(end.id, end.state, plain_text(end.reason), record.step, record.version) for end in record.ends],
                _reissues(record.ends),
                step=FinishedStep(record.step, record.version, len(record.ends), record.staleness_bound),
            )
        )

    def finish_training(self, final_version: int) -> Changes:
        """No further step will be made; what is live ends."""
        if self.final_version == final_version:
            return Changes()
        if self.final_version is not None:
            raise IllegalTransition(f"training is over already, at version {self.final_version}")
        return self._made(Changes([Transition(id, "failed", TRAINING_OVER) for id in self._live], final_version=final_version))

    # What is

    def state(self, id: GroupId) -> Literal["unknown", "in_flight", "queued", "returned", "ended"]:
        if group := self._live.get(id):
            return group.state
        return "ended" if id in self._seen else "unknown"

    def __contains__(self, id: GroupId) -> bool:
        """Whether this attempt has no end yet."""
        return id in self._live

    def live(self) -> list[LiveGroup]:
        """Every attempt in flight or queued, oldest dispatch first."""
        if not self._returned:
            return list(self._live.values())
        return [group for group in self._live.values() if group.state != "returned"]

    def returned(self) -> list[GroupId]:
        """Every attempt that waits to be generated again, oldest dispatch first."""
        return [group.id for group in self._live.values() if group.state == "returned"]

    def owed(self) -> list[GroupId]:
        """Reissues asked for and not dispatched yet, oldest first."""
        return list(self._owed)

    def counts(self) -> dict[str, int]:
        """The terms of the law, in attempts."""
        return {
            "dispatched": self.dispatched,
            **{str(state): number for state, number in self._ended.items()},
            "in_flight": len(self._live) - self._queued,
            "queued": self._queued,
        }

    @property
    def seq(self) -> int:
        """The number of events so far: ends, finished steps, the end of training."""
        return self._first_event + len(self._events)

    def events(self, since: int) -> LedgerEvents:
        """Events after `since`. Raises LedgerError when they are no longer held: a late comer starts from `live`."""
        if since < self._first_event:
            raise LedgerError(f"events after {since} are gone, the oldest held is {self._first_event}: begin with live()")
        news = list(islice(reversed(self._events), max(0, self.seq - since)))  # from the end: what is held is long, news are few
        ended = tuple([event for event in reversed(news) if event is not None])
        done = self.final_version is not None
        return LedgerEvents(self.seq, ended, self.finished_steps, done, self.final_version, self.staleness_bound)

    # How it changes

    def apply(self, changes: Changes, *, checked: bool = False) -> None:
        """Make changes that a file holds, or that were `checked` here just before. Raises IllegalTransition for a bad row of a
        file."""
        for id in changes.reissues:
            self._owed[id] = None
            self._asked.add(id)
        for transition in changes.transitions:
            if not checked:
                self._check_row(transition.id, transition.state)
            self._move(transition)
        if changes.cursor is not None:
            self.cursor = changes.cursor
        if changes.step is not None:
            self.finished_steps, self.staleness_bound = changes.step.step, changes.step.staleness_bound
            taken = {transition.id: transition.state for transition in changes.transitions if transition.step is not None}
            self._last_step = (changes.step, taken)
            self._events.append(None)
        if changes.final_version is not None:
            self.final_version = changes.final_version
            self._events.append(None)
        while len(self._events) > EVENTS_KEPT:
            self._events.popleft()
            self._first_event += 1

    def _made(self, changes: Changes) -> Changes:
        if changes:
            self.apply(changes, checked=True)
        return changes

    def _move(self, transition: Transition) -> None:
        id, state, _, _, version = transition
        if state == "dispatched":
            self._owed.pop(id, None)
            self._seen.add(id)
            self._live[id] = LiveGroup(id, version or 0, "in_flight")
            self.dispatched += 1
            return
        group = self._live[id]
        self._queued += (state == "queued") - (group.state == "queued")
        self._returned += (state == "returned") - (group.state == "returned")
        if state == "queued" or state == "returned":
            self._live[id] = LiveGroup(id, group.start_version, state)
        elif state == "restarted":
            self._live[id] = LiveGroup(id, version or 0, "in_flight")
        else:
            self._end(transition)

    def _end(self, transition: Transition) -> None:
        id, state, reason, step, _ = transition
        assert state == "trained" or state == "filtered" or state == "failed" or state == "expired"
        del self._live[id]
        self._ends[state].add(id)
        self._ended[state] += 1
        self._count_reason(state, reason)
        if state != "failed":
            self.failures_by_row.pop(id.row, None)
        elif step is None and reason != TRAINING_OVER:
            self.failures_by_row[id.row] = self.failures_by_row.get(id.row, 0) + 1
        self._events.append(End(id, state, reason, bool(self._asked) and _next_attempt(id) in self._asked))

    def _stands_dispatched(self, group: Dispatch) -> bool:
        if live := self._live.get(group.id):
            return live.state != "returned" and live.start_version == group.start_version
        return self.final_version is not None and group.id in self._seen

    def _stands_ended(self, end: End) -> bool:
        if end.id in self._cut:
            return True
        if end.id in self._live or end.id not in self._seen:
            return False
        said = end.id in self._ends[end.state] and (not end.reissue or _next_attempt(end.id) in self._asked)
        return said or self.final_version is not None

    def _stands_finished(self, record: StepRecord) -> bool:
        if self._last_step is None:
            return False
        last, taken = self._last_step
        return (record.step, record.version) == last[:2] and {end.id: end.state for end in record.ends} == taken

    def _check_row(self, id: GroupId, state: State) -> None:
        if state != "dispatched":
            self._check(id, state)
        elif id in self._seen:
            raise IllegalTransition(f"group {id} was dispatched before: an attempt starts once")

    def _check(self, id: GroupId, state: State) -> None:
        found = self.state(id)
        if found == "ended" or found == "unknown" or state not in SUCCESSORS["dispatched" if found == "in_flight" else found]:
            raise IllegalTransition(f"group {id} cannot become {state}: it is {found.replace('_', ' ')}")

    def _check_ends(self, ends: Sequence[End]) -> None:
        fresh = set()
        for end in ends:
            self._check(end.id, end.state)
            if end.id in fresh:
                raise IllegalTransition(f"group {end.id} ends twice in one call")
            if end.reissue and end.state == "trained":
                raise IllegalTransition(f"group {end.id} trained: it is not issued again")
            fresh.add(end.id)

    def _count_reason(self, state: State, reason: str) -> None:
        key = reason_key(state, reason)
        if key not in self.reasons and len(self.reasons) >= REASONS_KEPT:
            key = f"{state}: other"
        if key != "trained":
            self.reasons[key] = self.reasons.get(key, 0) + 1


def reason_key(state: str, reason: str) -> str:
    """What a reason is counted under: its head, up to the first colon, so that particulars do not make a kind of their own."""
    head = reason.partition(":")[0].strip()
    return f"{state}: {head}" if head else state


def plain_text(reason: str) -> str:
    """A reason as the ledger keeps it: of bounded length, and text that every file and frame can hold, whoever raised it."""
    return reason and reason[:REASON_CHARACTERS].replace("\0", "�").encode("utf-8", "replace").decode()


def _next_attempt(id: GroupId) -> GroupId:
    return GroupId(id[0], id[1], id[2] + 1)


def _reissues(ends: Iterable[End]) -> list[GroupId]:
    return [_next_attempt(end.id) for end in ends if end.reissue]
