"""Policy versions on their way to the servers, as trainer, servers and rollouter see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

ServerState = Literal["STARTING", "READY", "UPDATING", "STALE", "DEAD", "RESTARTING", "RETIRED"]
KvPolicy = Literal["keep", "recompute"]


class PolicyVersion(NamedTuple):
    """(incarnation, version), ordered: a newer start of the trainer wins whatever its version. Text form ``incarnation.version``,
    which is what a server reports as `weight_version`."""

    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.version}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        incarnation, version = (int(part) for part in text.split("."))
        return cls(incarnation, version)


class WeightPublisher(Protocol):
    """A trainer rank's side: copy this rank's shards into a staging slot and say so."""

    def register(self) -> None:
        """Tell ParameterSync this rank's slots and plan. Once, before the first `stage`."""

    def acquire(self, version: int) -> int:
        """Rank 0 only, blocking: the slot (0 or 1) that `version` may be written to. The service broadcasts the answer, so that
        every rank writes the same one. A slot that a server reads is never given; DeadlineExceeded when none comes free."""

    def stage(self, version: int, slot: int) -> float:
        """Blocking, on every rank: copy the local shards into `slot` and announce them (checksums follow off this thread).
        Returns the seconds that the optimizer was held."""

    def reannounce(self) -> None:
        """A new ParameterSync stands where the one registered with was: tell it plan and slots again, and what these hold. From
        any thread, also while another one registers, acquires or stages; nothing happens before `register` or after `close`."""

    def latest(self) -> Mapping[str, float]:
        """Flat metrics of the last confirmed update that this rank heard of (sync/pause_ms, sync/transfer_ms, sync/bytes,
        sync/version_lag), read without a remote call; empty before the first."""

    def wait_confirmed(self, version: int, timeout: float) -> bool:
        """Until every server, stale ones included, has confirmed `version`; False when `timeout` seconds pass."""

    def close(self) -> None:
        """Remove the slots."""


@dataclass(frozen=True)
class CommitReport:
    """pause_seconds: how long the decode loop was held for the swap. recompute_seconds: re-prefilling under `recompute`."""

    pause_seconds: float
    recompute_seconds: float = 0.0


class WeightTarget(Protocol):
    """A server's side: the live parameters, and a swap between two decode steps."""

    def find(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Learn by which Hugging Face names, with which shapes, the trainer knows the parameters, before `live` and `spare` are
        asked for; a server that keeps them fused or padded looks for each. Raises PlanMismatch for one that it cannot find."""

    def spare(self) -> Mapping[str, torch.Tensor]:
        """Tensors like the live ones that are not in use: a version is put together in them."""

    def live(self) -> Mapping[str, torch.Tensor]:
        """Parameters by their Hugging Face names; a tied parameter appears once, under its first name."""

    def commit(self, staged: Mapping[str, torch.Tensor], version: PolicyVersion, kv_policy: KvPolicy) -> CommitReport:
        """Blocking, from the receiver's thread: exchange live and staged tensors' memory between two decode steps. Afterwards
        `staged` holds the old weights, to be written over by the next version."""


class ServerLoad(NamedTuple):
    """What a server reports: requests that run and that wait in it, and the share of its KV memory in use."""

    running: int
    waiting: int
    kv_use: float


@dataclass(frozen=True)
class ServerView:
    """One server as the fleet sees it. Only READY and UPDATING servers take traffic. `load`: its last report, None where it makes
    none."""

    name: str
    url: str
    state: ServerState
    version: int | None
    load: ServerLoad | None = None

    @property
    def takes_traffic(self) -> bool:
        return self.state in ("READY", "UPDATING")


@dataclass(frozen=True)
class FleetView:
    """`confirmed` is the smallest version among the servers that take traffic; None before the first confirmation."""

    seq: int
    incarnation: int
    confirmed: int | None
    published: int | None
    servers: tuple[ServerView, ...]


class Fleet(Protocol):
    """The rollouter's eye on ParameterSync."""

    async def watch(self, since: int, timeout: float) -> FleetView:
        """The view, as soon as its `seq` passes `since`, or after `timeout` seconds."""
