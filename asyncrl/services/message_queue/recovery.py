"""How a message queue's process begins: the assembly says which, because only it knows what died."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.messages import GroupId


@dataclass(frozen=True)
class Fresh:
    """A run that nobody started before. Refused where the ledger has a word of an earlier one."""

    incarnation: int = 0


@dataclass(frozen=True)
class SetBack:
    """The trainer goes on from the checkpoint of `step` (0: from the beginning), as start number `incarnation`. Doing it again is
    harmless: a start that the ledger has is not made twice."""

    step: int
    incarnation: int


@dataclass(frozen=True)
class Restarted:
    """The queue's process alone was lost. `held`: scored groups in the trainer's hands (pool and current step), by which a queue
    of durability none knows what is not lost; the other durabilities know it from the journal."""

    held: frozenset[GroupId] = field(default_factory=frozenset)


Recovery = Fresh | SetBack | Restarted
