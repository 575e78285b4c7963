"""Rows and the runtime: what the supervisor knows of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.config.schema import Config
from asyncrl.errors import AsyncrlError
from asyncrl.services.service import AddressBook


@dataclass(frozen=True)
class Row:
    """One process of the run: `name` is its row in `status`, such as ``trainer/0``."""

    role: str
    index: int | None = None

    @property
    def name(self) -> str:
        return self.role if self.index is None else f"{self.role}/{self.index}"

    @property
    def decides_the_end(self) -> bool:
        """The run is finished when these have returned."""
        return self.role in ("trainer", "rollouter")


class RowFailed(AsyncrlError):
    """A row's process died (`lost`) or its service raised; `mistake`: it refused what the user gave it."""

    def __init__(self, row: Row, reason: str, lost: bool, mistake: bool = False):
        self.row, self.reason, self.lost, self.mistake = row, reason, lost, mistake
        super().__init__(f"{row.name}: {reason}")


@dataclass(frozen=True)
class Resume:
    """What a launched run goes on from: the checkpoint of `step` (its folder), or nothing but the ledger where step is 0.

    launches: of this run, this one included; wall_s: seconds that they took up to that checkpoint."""

    incarnation: int
    step: int = 0
    checkpoint: str | None = None
    launches: int = 2
    wall_s: float = 0.0


@dataclass(frozen=True)
class Life:
    """What a row's process is told of those before it.

    incarnation: of the trainer. earlier: addresses that this row had, to be bound again. checkpoint: the folder that the trainer
    loads. set_back_to: the step that the ledger is set back to. held: scored groups that the trainer holds while a queue without
    durability is replaced. `first`: no process of this row ran before in this launch. launched: wall time at which this launch
    began; earlier_s: seconds that the launches before it took.
    """

    incarnation: int = 1
    earlier: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str | None = None
    set_back_to: int | None = None
    held: tuple[str, ...] | None = None
    first: bool = True
    launched: float | None = None
    earlier_s: float = 0.0


class Runtime(Protocol):
    """Places, starts, watches and stops processes. Every call may raise RowFailed."""

    async def open(self) -> None:
        """Get ready to place processes (start or join the cluster)."""

    async def prepare_model(self) -> None:
        """Make what must exist before trainer and servers start: a built-in model's folder."""

    def place(self, row: Row, life: Life) -> None:
        """Create the row's process; one that it had before has ended."""

    async def start(self, row: Row) -> dict[str, str]:
        """The service's addresses, once it is up; ``pid`` and ``host`` among them."""

    async def run(self, row: Row, book: AddressBook) -> Mapping[str, Any]:
        """The service's summary, once its `run` has returned."""

    async def end(self, row: Row) -> None:
        """End the row's process at once, if it has one, with everything below it, and return when it is gone."""

    async def close(self) -> None:
        """Leave no process and no file of the runtime behind."""


STOP_ORDER = ("rollouter", "reward", "trainer", "parameter_sync", "inference", "teacher", "message_queue")
"""Producers before consumers, and the ledger's process last, so that everything said on the way out is written."""


def rows_of(config: Config) -> list[Row]:
    """Every process of a run, in the order of `status`."""
    return [
        Row("rollouter"),
        Row("message_queue"),
        Row("parameter_sync"),
        Row("reward"),
        *(Row("reward", index) for index in range(config.reward.workers)),
        *(Row("trainer", index) for index in range(config.training.ranks)),
        *(Row("inference", index) for index in range(config.inference.servers)),
        *([Row("teacher", 0)] if config.algorithm.serves_teacher else []),
    ]


def with_the_fleets_word(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `status`. A server says of itself that it serves; that it takes no traffic (stale, dead, retired) ParameterSync
    knows, and which servers joined the run, without a process of the run's own."""
    fleet = next((row for row in rows if row["name"] == "parameter_sync"), {})
    states, reasons = fleet.get("servers") or {}, fleet.get("reasons") or {}
    said = []
    for row in rows:
        state = states.get(row["name"])
        if state in ("STALE", "DEAD", "RETIRED") and row["state"] == "serving":
            said.append({**row, "state": state.lower(), "reason": reasons.get(row["name"], "")})
        else:
            said.append(dict(row))
    known = {row["name"] for row in rows}
    joined = ((name, state) for name, state in states.items() if name not in known)
    return said + [{"name": name, "pid": None, "host": None, "state": state.lower(), "version": None} for name, state in joined]
