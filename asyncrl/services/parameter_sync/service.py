"""ParameterSync: carries every published version to every server, and knows which server confirmed what.

    trainer ranks ──register, acquire_slot, staged──▶ [FleetState] ◀──fleet, wait_confirmed── rollouter, trainer
                                                        ▲      │ next_transfer
                                           status, heard│      ▼
                             [listen, one a server] ────┘  [tend, one a server] ──BEGIN FETCH COMMIT DIGEST──▶ receiver

    loop     consumes             waits for                              is unblocked by
    tend     published versions   a version this server has not          a rank's `staged`, another server's slot, a retry
    listen   STATUS replies       the next heartbeat                     time, by a deadline
    rpc      remote calls         changes (fleet, wait_confirmed)        whatever changes the fleet, by the caller's deadline

Decisions are FleetState's; this file moves messages and takes the time. It keeps nothing that it could not learn again: one that
was started again knows the servers from the book and what they hold from their STATUS; the trainer ranks say what lies in their
slots when they register anew, which they do when they are asked to, or when a call of theirs is refused with NotRegistered. Until
then no server takes traffic. Every call may be made twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from asyncrl.clock import Clock
from asyncrl.errors import AsyncrlError, DeadlineExceeded, NotRegistered, RunError, SyncError
from asyncrl.protocols.weights import FleetView, KvPolicy, PolicyVersion, ServerLoad
from asyncrl.services.parameter_sync.fleet import Content, FleetState, Transfer
from asyncrl.services.parameter_sync.stats import SyncStats
from asyncrl.services.service import NOWHERE, AddressBook, service_rpc
from asyncrl.weight_sync.channel import Order, Outcome, Progress, Unverified
from asyncrl.weight_sync.fleet_client import view_to_wire
from asyncrl.weight_sync.plan import Plan, RankPlan, merge
from asyncrl.weight_sync.wire import digest_of

log = logging.getLogger(__name__)
STATUS_SECONDS = 2.0  # a question lost with a server's process is asked again after this
RETIRE_SECONDS = 5.0  # an update of a server that is taken out has this long to end
PUBLICATION_SECONDS = 0.25  # who watches hears of a publication with the confirmation that follows it, or after this


class Channel(Protocol):
    """A line to one receiver: weight_sync.channel.ReceiverChannel, or a fake. `when_lost` is called when the line breaks."""

    when_lost: Callable[[], None]

    async def status(self, timeout: float) -> dict[str, Any]: ...

    async def update(self, order: Order, progress: Progress) -> Outcome: ...

    def cancel(self, version: PolicyVersion) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class SyncSettings:
    """sync.* of pipeline.yaml, in bytes and seconds."""

    transport: Literal["auto", "shared_memory", "zeromq"] = "auto"
    kv_policy: KvPolicy = "keep"
    verify: bool = True
    verify_every: int = 1
    bucket_bytes: int = 16_000_000
    bytes_per_second: float | None = None
    timeout_seconds: float = 60.0
    heartbeat_seconds: float = 0.5
    silence_seconds: float = 10.0


@dataclass
class _Line:
    """One server's address, channel and loops; `wrong`: the digest of live weights that are not those published; `compared`: the
    incarnation of which a version was found right there, since anything went wrong."""

    weights: str
    channel: Channel
    loops: list[asyncio.Task[None]]
    update: asyncio.Task[Outcome] | None = None
    wrong: tuple[PolicyVersion, str] | None = None
    compared: int | None = None


class ParameterSyncService:
    """The service `parameter_sync`. `connect(name, http, weights)` makes the line to the server of these addresses."""

    name = "parameter_sync"

    def __init__(
        self, settings: SyncSettings, *, connect: Callable[[str, str, str], Channel], clock: Clock, record: Path | None = None
    ):
        """record: the file of what happened to each version, which one that was started again goes on with."""
        self._settings, self._connect, self._clock = settings, connect, clock
        self._session = secrets.token_hex(8)  # of this process: views are numbered anew in each
        self._fleet = FleetState(silence_seconds=settings.silence_seconds)
        self._stats = SyncStats(record)
        self._lines: dict[str, _Line] = {}
        self._parts: dict[int, tuple[RankPlan, tuple[str, ...]]] = {}
        self._plan: Plan | None = None
        self._checksums: dict[tuple[int, int], npt.NDArray[np.uint32]] = {}  # (slot, rank)
        self._waits: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        handlers: dict[str, Callable[..., Any]] = {
            "register": self.register,
            "acquire_slot": self.acquire_slot,
            "staged": self._staged_when_registered,
            "fleet": self.fleet,
            "wait_confirmed": self.wait_confirmed,
            "add_server": self.add_server,
            "server": self.server,
            "servers": self.servers,
            "retire_server": self.retire_server,
            "restarting_server": self.restarting_server,
            "give_up_server": self.give_up_server,
            "latest": self._stats.latest,
            "stats": self._stats.summary,
        }
        self._rpc = service_rpc(self, handlers)

    async def start(self, earlier: Mapping[str, str] = NOWHERE) -> dict[str, str]:
        return {"rpc": await self._rpc.start(earlier.get("rpc"))}

    async def run(self, book: AddressBook) -> None:
        for name, addresses in book.items():
            if name.startswith("inference/"):
                await self.add_server(name, addresses.get("http", ""), addresses.get("weights", ""))
        try:
            await self._stopping.wait()
            if self._failure is not None:
                raise self._failure
        finally:
            for line in self._lines.values():
                await self._drop(line)
            await self._rpc.close()

    async def stop(self) -> None:
        self._stopping.set()

    def status(self) -> dict[str, Any]:
        view = self._fleet.view()
        servers = {server.name: server.state for server in view.servers}
        reasons = {name: reason for name in servers if (reason := self._fleet.reason_of(name))}
        state = "ready" if self._fleet.incarnation >= 0 else "waiting for the trainer"
        return {"state": state, "version": view.confirmed, "published": view.published, "servers": servers, "reasons": reasons}

    def summary(self) -> dict[str, Any]:
        return {"sync": self._stats.summary()}

    # Remote calls: the trainer

    def register(
        self,
        rank: int,
        world_size: int,
        incarnation: int,
        plan: dict[str, Any],
        slots: list[str],
        contents: Sequence[tuple[int, int, npt.NDArray[np.uint32] | None]] = (),
    ) -> None:
        """A rank's plan, the names of its slots, and what they hold: (slot, version, checksums), these None while the version is
        being written. When the last rank is there the plans are put together and checked."""
        if self._fleet.open_incarnation(incarnation, world_size):
            self._parts, self._plan, self._checksums = {}, None, {}
            self._cancel_updates()
        self._parts[rank] = (RankPlan.from_wire(plan), tuple(slots))
        if len(self._parts) == world_size:
            self._plan = merge(part for part, _ in self._parts.values())
            log.info(
                "incarnation %d: %d tensors, %.1f MB, %d ranks",
                incarnation,
                len(self._plan.tensors),
                self._plan.num_bytes / 1e6,
                world_size,
            )
        self._restore(rank, contents)
        self._notify()

    def _restore(self, rank: int, contents: Sequence[tuple[int, int, npt.NDArray[np.uint32] | None]]) -> None:
        restored = self._fleet.restore(rank, [Content(slot, version, sums is not None) for slot, version, sums in contents])
        for slot, version, sums in contents:
            if sums is not None and self._fleet.is_for(slot, version):
                self._checksums[slot, rank] = np.array(sums, dtype=np.uint32)
        for version in restored:
            log.info("version %d lies in the trainer's slots", version)
            self._stats.published(self._version(version))

    def acquire_slot(self, incarnation: int, version: int) -> int:
        slot = self._fleet.acquire(incarnation, version)
        self._notify()
        return slot

    def staged(self, rank: int, incarnation: int, version: int, slot: int, checksums: npt.NDArray[np.uint32]) -> dict[str, float]:
        """A rank's shards lie in the slot. Answers with the metrics of the last confirmed update."""
        self._check_registered(rank, incarnation)
        if self._fleet.is_for(slot, version):
            self._checksums[slot, rank] = np.array(checksums, dtype=np.uint32)
        if self._fleet.staged(incarnation, rank, version, slot):
            self._stats.published(self._version(version))
            self._notify()
        return self._stats.latest()

    async def _staged_when_registered(self, rank: int, incarnation: int, **announcement: Any) -> dict[str, float]:
        """`staged`, once the slower ranks have registered too."""
        self._check_registered(rank, incarnation)
        await self._until(lambda: self._plan is not None, self._settings.timeout_seconds)
        return self.staged(rank=rank, incarnation=incarnation, **announcement)

    def _check_registered(self, rank: int, incarnation: int) -> None:
        self._fleet.check_registered(incarnation)
        if rank not in self._parts:
            raise NotRegistered(f"rank {rank} of the trainer has not registered here")

    async def wait_confirmed(self, incarnation: int, version: int, patience: float) -> bool:
        """Until every server, stale ones included, confirmed `version`; False after `patience` seconds."""
        self._fleet.check_registered(incarnation)
        return await self._until(lambda: self.is_confirmed(incarnation, version), patience)

    def is_confirmed(self, incarnation: int, version: int) -> bool:
        """Whether every server, and there is one, confirmed `version` now."""
        self._fleet.check_incarnation(incarnation)
        return self._fleet.is_confirmed(version)

    # Remote calls: everybody else

    async def fleet(self, since: int, patience: float, session: str | None = None) -> dict[str, Any]:
        """`watch`, as plain values. session: whose view `since` is of; one of another process is behind every view of this."""
        known = since if session in (None, self._session) else -1
        return view_to_wire(await self.watch(known, patience), self._session)

    async def watch(self, since: int, timeout: float) -> FleetView:
        """The fleet's view as soon as its seq passes `since`, or after `timeout` seconds. A publication alone waits up to
        PUBLICATION_SECONDS for its confirmation: nobody acts on it before."""
        patience = min(timeout, PUBLICATION_SECONDS)
        if not await self._until(lambda: self._fleet.has_news(since), patience):
            await self._until(lambda: self._fleet.view().seq > since, timeout - patience)
        return self._fleet.view()

    async def add_server(self, name: str, http: str, weights: str) -> None:
        """A server, or the new process of a known one, whose receiver is at `weights`."""
        known = self._lines.pop(name, None)
        if known is not None:
            await self._drop(known)
        self._fleet.add(name, http, self._clock.now())
        line = _Line(weights, self._connect(name, http, weights), [])
        self._lines[name] = line
        line.channel.when_lost = lambda: self._on_lost(name, line)
        line.loops = [asyncio.create_task(loop) for loop in (self._listen(name, line), self._tend(name, line))]
        for task in line.loops:
            task.add_done_callback(self._on_loop_ended)
        self._notify()

    def server(self, name: str, load: Sequence[float] | None = None) -> dict[str, Any]:
        """What is known of one server, for its own row of `status`. load: what it reports, as a ServerLoad's values."""
        if load is not None:
            running, waiting, kv_use = load
            self._fleet.reports(name, ServerLoad(int(running), int(waiting), float(kv_use)))
            self._notify()
        return {"version": self._fleet.version_of(name), "fleet": self._fleet.state_of(name), **self._stats.latest_of(name)}

    def servers(self) -> list[dict[str, Any]]:
        """Every server of the fleet: name, url, state, version, reason (why it takes no traffic), load, and what its last version
        took."""
        return [
            {
                "name": server.name,
                "url": server.url,
                "state": server.state,
                "version": server.version,
                "reason": self._fleet.reason_of(server.name),
                "load": server.load._asdict() if server.load is not None else None,
                **self._stats.latest_of(server.name),
            }
            for server in self._fleet.view().servers
        ]

    async def retire_server(self, name: str) -> None:
        """Out of the run: what it has been asked for ends there, and nothing new begins. An update under way is let end, so that
        no version is live there that was not compared. Raises SyncError for one that is not there, and for the last."""
        states = {server.name: server.state for server in self._fleet.view().servers}
        if name not in states:
            raise SyncError(f"there is no server {name}: the run has {', '.join(sorted(states))}")
        if not [other for other, state in states.items() if other != name and state not in ("RETIRED", "DEAD")]:
            raise SyncError(f"{name} is the run's last server, without which nothing can be generated: add another one first")
        self._fleet.retire(name)
        self._notify()
        if (line := self._lines.get(name)) is not None:
            await self._until(lambda: line.update is None, min(RETIRE_SECONDS, self._settings.timeout_seconds / 2))
        if self._lines.pop(name, None) is line is not None:
            await self._drop(line)
            self._fleet.left(name)
            self._notify()

    def restarting_server(self, name: str, reason: str) -> None:
        """Its owner starts it again."""
        if name in self._lines:
            self._fleet.restarts(name, reason)
            self._cancel(self._lines[name])
            self._notify()

    def give_up_server(self, name: str, reason: str) -> None:
        """Its owner does not start it again. Without any server the run is over."""
        if self._fleet.give_up(name, reason):
            told = "; ".join(f"{each}: {why.splitlines()[0]}" for each, why in self._fleet.given_up().items())
            self._failure = RunError(
                f"no inference server is left and none comes back, so nothing can be generated any more ({told})"
            )
            self._stopping.set()
        if name in self._lines:
            self._cancel(self._lines[name])
        self._notify()

    # Loops, one of each a server

    async def _listen(self, name: str, line: _Line) -> None:
        settings = self._settings
        while True:
            try:
                status = await line.channel.status(min(STATUS_SECONDS, settings.silence_seconds / 2))
            except DeadlineExceeded:
                status = None
            seq, was_awaited = self._fleet.view().seq, self._fleet.is_to_ask(name)
            if status is not None:
                self._on_status(name, line, status)
            if status is None and self._fleet.missed(name, self._clock.now()):
                log.error("%s is %s: DEAD until it answers", name, self._fleet.reason_of(name))
                self._cancel(line)
            if self._fleet.view().seq != seq or was_awaited:
                self._notify()
            await asyncio.sleep(settings.heartbeat_seconds)

    def _on_lost(self, name: str, line: _Line) -> None:
        """Its process has ended, most likely: nobody need wait until its silence says so."""
        log.warning("the connection to %s broke: STALE until it says what it holds", name)
        self._fleet.lost(name)
        self._cancel(line)
        self._notify()

    def _on_status(self, name: str, line: _Line, status: Mapping[str, Any]) -> None:
        """What a server says of itself: that it is another process, or what it holds, which may be all that is wanted of it."""
        if self._fleet.heard(name, status["session"], self._clock.now()):
            line.compared = None
            log.warning("%s was restarted: STALE until it confirms the current version", name)
            self._cancel(line)
        version = PolicyVersion.parse(status["committed"]) if status["committed"] is not None else None
        self._fleet.holds(name, version)
        if version is None or not self._fleet.may_adopt(name, version):
            return
        if self._settings.verify and status["digest"] != self._digest(version.version):
            self._on_other_weights(name, line, version, status["digest"])
            return
        self._fleet.adopt(name, version, self._clock.now())
        self._stats.adopted(version, server=name, verified=self._settings.verify)
        log.info("%s holds %s already", name, version)

    def _on_other_weights(self, name: str, line: _Line, version: PolicyVersion, digest: str | None) -> None:
        """What is live there is not what was published, or nobody has looked yet (None): it is sent again."""
        if digest is not None and line.wrong != (version, digest):
            line.wrong = version, digest
            self._stats.unverified(version, server=name, reason="differs")

    def _digest(self, version: int) -> str:
        """Of a version that lies in a slot, as its publisher took it."""
        slot = self._fleet.slot_of(version)
        return digest_of(np.concatenate([self._checksums[slot, rank] for rank in range(len(self._parts))]))

    async def _tend(self, name: str, line: _Line) -> None:
        while True:
            transfer = self._fleet.next_transfer(name, self._clock.now())
            if transfer is None:
                retry_in = self._fleet.retry_at(name) - self._clock.now()
                patience = retry_in if retry_in > 0 else self._settings.timeout_seconds
                await self._change(lambda: self._fleet.may_read(name, self._clock.now()), patience)
            else:
                await self._update(transfer, line)

    async def _update(self, transfer: Transfer, line: _Line) -> None:
        """One try to bring one version to one server; whatever happens, the slot is released."""
        progress = Progress(
            refused=lambda count: self._on_refused(transfer, count),
            transferred=lambda: self._on_transferred(transfer),
            unverified=lambda reason: self._on_unverified(transfer, reason),
        )
        line.update = asyncio.create_task(line.channel.update(self._order(transfer, line), progress))
        try:
            outcome = await asyncio.shield(line.update)
        except (AsyncrlError, OSError) as error:
            self._on_failed(transfer, line, error)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():  # the loop itself is being ended, not only the update
                line.update.cancel()
                raise
            line.channel.cancel(transfer.version)
            self._fleet.fail(transfer, f"{transfer.version} was called off", self._clock.now())
        else:
            self._on_confirmed(transfer, outcome)
        finally:
            line.update = None
            self._notify()

    def _order(self, transfer: Transfer, line: _Line) -> Order:
        assert self._plan is not None, "a version was published"
        settings, ranks = self._settings, range(len(self._parts))
        local = line.weights.startswith(("tcp://127.", "ipc://", "inproc://"))
        carrier = settings.transport if settings.transport != "auto" else ("shared_memory" if local else "zeromq")
        checksums = np.concatenate([self._checksums[transfer.slot, rank] for rank in ranks])
        return Order(
            version=transfer.version,
            plan=self._plan,
            slots=tuple(self._parts[rank][1][transfer.slot] for rank in ranks),
            checksums=checksums,
            carrier=carrier,
            kv_policy=settings.kv_policy,
            verify=self._compares(transfer, line),
            bucket_bytes=settings.bucket_bytes,
            bytes_per_second=settings.bytes_per_second,
            timeout_seconds=settings.timeout_seconds,
        )

    def _on_refused(self, transfer: Transfer, count: int) -> None:
        self._stats.refused(transfer.version, server=transfer.server, slices=count)
        self._fleet.refused(transfer)
        log.error("%s: %d slices of %s arrived wrong; sent again", transfer.server, count, transfer.version)
        self._notify()

    def _on_transferred(self, transfer: Transfer) -> None:
        self._fleet.transferred(transfer)
        self._notify()

    def _compares(self, transfer: Transfer, line: _Line) -> bool:
        """A server's first version, in this incarnation and after each failure, and then each `verify_every`-th."""
        if not self._settings.verify:
            return False
        return line.compared != transfer.version.incarnation or transfer.version.version % self._settings.verify_every == 0

    def _on_unverified(self, transfer: Transfer, reason: Unverified) -> None:
        line = self._lines.get(transfer.server)
        if reason == "unasked" and self._settings.verify:
            return  # it was not its turn
        if line is not None:
            line.compared = None
        self._stats.unverified(transfer.version, server=transfer.server, reason=reason)

    def _on_failed(self, transfer: Transfer, line: _Line, error: Exception) -> None:
        line.compared = None
        self._stats.failed(transfer.version, server=transfer.server, reason=f"{type(error).__name__}: {error}")
        if isinstance(error, DeadlineExceeded):
            line.channel.cancel(transfer.version)
        self._fleet.fail(transfer, f"{type(error).__name__}: {error}", self._clock.now())
        log.error("%s did not confirm %s: %s", transfer.server, transfer.version, error)

    def _on_confirmed(self, transfer: Transfer, outcome: Outcome) -> None:
        if not self._fleet.confirm(transfer, self._clock.now()):
            return
        if outcome.verified:
            self._lines[transfer.server].compared = transfer.version.incarnation
        self._stats.confirmed(
            transfer.version,
            server=transfer.server,
            pause_ms=outcome.pause_seconds * 1e3,
            transfer_ms=outcome.transfer_seconds * 1e3,
            bytes=outcome.num_bytes,
        )

    # Waiting and ending

    def _version(self, version: int) -> PolicyVersion:
        return PolicyVersion(self._fleet.incarnation, version)

    def _notify(self) -> None:
        """Something has changed: wake those whose wait it ends."""
        for woken, holds in self._waits.items():
            if _is_over(holds):
                _wake(woken)

    async def _change(self, holds: Callable[[], bool], patience: float) -> None:
        """Until a change makes `holds` true, or raise, or `patience` seconds have passed."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(patience, _wake, woken)
        self._waits[woken] = holds
        try:
            await woken
        finally:
            timer.cancel()
            del self._waits[woken]

    async def _until(self, holds: Callable[[], bool], patience: float) -> bool:
        deadline = self._clock.now() + patience
        while not holds():
            left = deadline - self._clock.now()
            if left <= 0:
                return False
            await self._change(holds, left)
        return True

    def _on_loop_ended(self, task: asyncio.Task[None]) -> None:
        """A loop ends only when it is cancelled; anything else is a bug, and ends the service."""
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._stopping.set()

    def _cancel_updates(self) -> None:
        for line in self._lines.values():
            self._cancel(line)

    def _cancel(self, line: _Line) -> None:
        if line.update is not None:
            line.update.cancel()

    async def _drop(self, line: _Line) -> None:
        for task in (*line.loops, *([line.update] if line.update is not None else [])):
            task.cancel()
        await asyncio.gather(*line.loops, return_exceptions=True)
        await line.channel.close()


def _is_over(holds: Callable[[], bool]) -> bool:
    """What raises is over too: it raises again where it is awaited."""
    try:
        return holds()
    except AsyncrlError:
        return True


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
