"""The fleet and the slots, as a state machine of plain values: no clock, socket or process.

                     confirms a version                    a newer version is published
    STARTING ───────────────────────────▶ READY ◀────────────────────────────────────▶ UPDATING   (both take traffic)
        │                                   │  a deadline passed, restarted, or wrong     │
        └───────────────▶ STALE ◀───────────┴─────────────────────────────────────────────┘
                            │  confirms a version not behind the fleet's ──▶ READY or UPDATING
    silent for too long ──▶ DEAD ── heard again ──▶ STALE
    its owner starts it again ──▶ RESTARTING ── heard again ──▶ STALE      its owner gave it up ──▶ DEAD for good
    taken out of the run ──▶ RETIRED

Rules kept here:
- A slot that a server reads (until it holds every slice, checked) is never given to the trainer, and servers read from one slot
  at a time: so one slot is always free, and the trainer never waits for a server. What is written over unread is skipped.
- The newest complete version goes out; a transfer under way is finished first, so that a slow server is not starved.
- What the fleet confirmed (the smallest version among servers that take traffic) never falls within an incarnation while a
  server takes traffic: who was STALE returns only with at least that version.
- A newer incarnation makes every server STALE until it confirms a version of it; messages of an older one are refused, also
  by a ParameterSync that has just started and knows of the newer one only by what a server holds.
- What was never published here can be restored: each rank says what its slots hold. A slot that any rank has begun to write over
  holds nothing, the newest version named for it counts, and every server is asked what it has before anything is sent to it.
- A server that holds the newest version, by its own word and digest, is confirmed without a transfer; one that says that it holds
  another version than it confirmed takes no traffic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.errors import NotRegistered, StaleIncarnation, SyncError
from asyncrl.protocols.weights import FleetView, PolicyVersion, ServerLoad, ServerState, ServerView

RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Transfer:
    """`server` reads `version` from `slot`. `number` tells it from an earlier try of the same."""

    server: str
    version: PolicyVersion
    slot: int
    number: int


@dataclass(frozen=True)
class Content:
    """What one rank's `slot` holds: all of `version`, or (not `whole`) it is being written over by it."""

    slot: int
    version: int
    whole: bool


@dataclass
class _Server:
    name: str
    url: str
    heard_at: float
    session: str | None = None
    confirmed: PolicyVersion | None = None
    in_traffic: bool = False
    ever_confirmed: bool = False
    dead: bool = False
    missed: int = 0
    transfer: Transfer | None = None
    reading: bool = False
    retry_at: float = 0.0
    reason: str = ""
    to_ask: bool = True
    restarting: bool = False
    given_up: bool = False
    retired: bool = False
    load: ServerLoad | None = None

    @property
    def is_counted_on(self) -> bool:
        """Whether it serves, or will again."""
        return not (self.given_up or self.retired)


@dataclass
class _Slot:
    writing: int | None = None
    complete: int | None = None
    staged: set[int] = field(default_factory=set)

    @property
    def version(self) -> int | None:
        return self.writing if self.writing is not None else self.complete


class FleetState:
    """Everything ParameterSync decides. Times are seconds on one axis, given by the caller."""

    def __init__(self, *, num_slots: int = 2, silence_seconds: float = 10.0):
        assert num_slots >= 2
        self._num_slots, self._silence = num_slots, silence_seconds
        self.incarnation = -1  # none has registered
        self._newest_seen = -1  # among what servers hold
        self.world_size = 0
        self._slots = [_Slot() for _ in range(num_slots)]
        self._servers: dict[str, _Server] = {}
        self._numbers = 0
        self._newest_acquired: int | None = None
        self.published: int | None = None  # the newest version that every rank staged; it may be written over since
        self._seq = 0
        self._seen: tuple[object, ...] = ()
        self._news_seq = 0
        self._news: tuple[object, ...] = ()

    # The trainer's side

    def open_incarnation(self, incarnation: int, world_size: int) -> bool:
        """A trainer rank registers. True when this opens a newer incarnation: slots are empty, transfers are off, and every
        server is STALE until it confirms. Raises StaleIncarnation for an older one."""
        self.check_incarnation(incarnation)
        if incarnation == self.incarnation:
            return False
        self.incarnation, self.world_size, self._newest_acquired = incarnation, world_size, None
        self.published = None
        self._slots = [_Slot() for _ in range(self._num_slots)]
        for server in self._servers.values():
            server.transfer, server.retry_at = None, 0.0
            server.in_traffic = False
            server.reason = f"has no weights of incarnation {incarnation} yet" if server.ever_confirmed else ""
        return True

    def check_incarnation(self, incarnation: int) -> None:
        newest = max(self.incarnation, self._newest_seen)
        if incarnation < newest:
            raise StaleIncarnation(f"incarnation {incarnation} of the trainer is over, {newest} has begun: end the old trainer")

    def check_registered(self, incarnation: int) -> None:
        """Raises StaleIncarnation for an older one, NotRegistered for one that never said what it has."""
        self.check_incarnation(incarnation)
        if incarnation != self.incarnation:
            raise NotRegistered(f"incarnation {incarnation} of the trainer has not registered here")

    def acquire(self, incarnation: int, version: int) -> int:
        """The slot for `version`: one that no server reads, an old version's before the newest's. There always is one. Asked
        again for what is being written, the slot is the same."""
        self.check_registered(incarnation)
        if version == self._newest_acquired:
            for index, slot in enumerate(self._slots):
                if slot.writing == version and not slot.staged:
                    return index
        if self._newest_acquired is not None and version <= self._newest_acquired:
            raise SyncError(f"versions must grow: {version} after {self._newest_acquired}")
        read, newest = self._slots_read(), self._newest_complete()
        free = [index for index in range(self._num_slots) if index not in read]
        assert free, "servers read from one slot at a time"
        chosen = next(
            (index for index in free if self._slots[index].complete is None or self._slots[index].complete != newest), free[0]
        )
        self._slots[chosen] = _Slot(writing=version)
        self._newest_acquired = version
        return chosen

    def staged(self, incarnation: int, rank: int, version: int, slot: int) -> bool:
        """A rank has written its shards. True when it was the last, so that the version is published. A version whose slot was
        given away meanwhile is ignored."""
        self.check_incarnation(incarnation)
        held = self._slots[slot]
        if incarnation != self.incarnation or held.writing != version:
            return False
        held.staged.add(rank)
        if len(held.staged) < self.world_size:
            return False
        held.complete, held.writing = version, None
        self.published = version if self.published is None else max(version, self.published)
        return True

    def slot_of(self, version: int) -> int:
        """Where a whole version lies."""
        return next(index for index, held in enumerate(self._slots) if held.complete == version)

    def is_for(self, slot: int, version: int) -> bool:
        """Whether `slot` holds `version`, or is being written with it."""
        return self._slots[slot].version == version

    def restore(self, rank: int, contents: Iterable[Content]) -> list[int]:
        """A rank that registered says what its slots hold. Returns the versions that are whole since, newest last."""
        restored = []
        for content in contents:
            held = self._slots[content.slot]
            if held.version is not None and content.version < held.version:
                continue  # another rank has begun to write over it
            if held.version != content.version:
                held = self._slots[content.slot] = _Slot(writing=content.version)
                self._call_off_readers(content.slot)
            self._newest_acquired = max(content.version, -1 if self._newest_acquired is None else self._newest_acquired)
            if content.whole and self.staged(self.incarnation, rank, content.version, content.slot):
                restored.append(content.version)
        if restored:
            for server in self._servers.values():
                server.to_ask = not server.in_traffic
        return sorted(restored)

    def _call_off_readers(self, slot: int) -> None:
        for server in self._servers.values():
            if server.transfer is not None and server.reading and server.transfer.slot == slot:
                server.transfer = None

    # The servers' side

    def add(self, name: str, url: str, now: float) -> None:
        """A server, or a new process of one that was known."""
        known = self._servers.get(name)
        self._servers[name] = _Server(name, url, now, ever_confirmed=known is not None and known.ever_confirmed)

    def heard(self, name: str, session: str, now: float) -> bool:
        """A server answered. True when it is another process than before: it holds nothing, and its transfer is off."""
        server = self._servers[name]
        server.heard_at, server.missed, server.to_ask, server.restarting = now, 0, False, False
        if server.dead:
            server.dead, server.reason = False, "was silent"
        restarted = server.session is not None and server.session != session
        server.session = session
        if restarted:
            server.confirmed, server.in_traffic, server.transfer, server.retry_at = None, False, None, 0.0
            server.reason = "was restarted"
        return restarted

    def holds(self, name: str, version: PolicyVersion | None) -> None:
        """What the server says that is live there. It matters between transfers: who confirmed something else is wrong."""
        server = self._servers[name]
        if version is not None:
            self._newest_seen = max(self._newest_seen, version.incarnation)
        if server.in_traffic and server.transfer is None and version != server.confirmed:
            server.in_traffic = False
            server.reason = f"holds {version if version is not None else 'no version'}, and had confirmed {server.confirmed}"

    def lost(self, name: str) -> None:
        """The line to its process broke. It holds no slot and takes no traffic until it has said what it holds."""
        server = self._servers[name]
        if not server.dead:
            server.in_traffic, server.transfer, server.to_ask = False, None, True
            server.reason = "its connection broke"

    def restarts(self, name: str, reason: str) -> None:
        """Its owner ends its process and starts another, which is heard of again."""
        server = self._servers[name]
        server.in_traffic, server.transfer, server.to_ask = False, None, True
        server.restarting, server.reason = True, reason

    def reports(self, name: str, load: ServerLoad) -> None:
        """How much it has to do."""
        self._servers[name].load = load

    def give_up(self, name: str, reason: str) -> bool:
        """It does not come back. True when no other server is left."""
        server = self._servers[name]
        server.dead, server.given_up, server.restarting = True, True, False
        server.in_traffic, server.transfer, server.reason = False, None, reason
        return not any(other.is_counted_on for other in self._servers.values())

    def retire(self, name: str) -> None:
        """It is taken out of the run: no traffic, and no further version. One that is under way may still be confirmed."""
        server = self._servers[name]
        server.retired, server.in_traffic = True, False

    def left(self, name: str) -> None:
        """The line to a retired server is closed: what may still be under way to it holds no slot."""
        self._servers[name].transfer = None

    def may_adopt(self, name: str, version: PolicyVersion) -> bool:
        """Whether a server that says it holds `version` need not be sent anything, if it tells the truth."""
        server = self._servers[name]
        is_idle = not (server.dead or server.retired or server.in_traffic or server.transfer is not None)
        return is_idle and version == PolicyVersion(self.incarnation, -1 if (new := self._newest_complete()) is None else new)

    def adopt(self, name: str, version: PolicyVersion, now: float) -> None:
        """Its word was found true: the server has confirmed `version`."""
        assert self.may_adopt(name, version)
        self._confirmed_by(self._servers[name], version, now)

    def missed(self, name: str, now: float) -> bool:
        """A probe went unanswered. True when the server is DEAD from now on: nothing heard for long, and not the first probe
        missed (one may be our own lateness)."""
        server = self._servers[name]
        server.missed += 1
        if server.dead or server.restarting or server.missed < 2 or now - server.heard_at <= self._silence:
            return False
        server.dead, server.in_traffic, server.transfer = True, False, None
        server.reason = f"silent for {now - server.heard_at:.0f} s"
        return True

    def may_read(self, name: str, now: float) -> bool:
        """Whether there is something that this server should read now."""
        server = self._servers[name]
        if server.dead or server.retired or server.to_ask or server.transfer is not None or now < server.retry_at:
            return False
        newest = self._newest_complete()
        if newest is None or (server.in_traffic and server.confirmed is not None and server.confirmed.version >= newest):
            return False
        return not self._slots_read() - {self.slot_of(newest)}

    def next_transfer(self, name: str, now: float) -> Transfer | None:
        """What this server should read now, if anything; it holds the slot until `transferred`, `confirm` or `fail`."""
        newest = self._newest_complete()
        if newest is None or not self.may_read(name, now):
            return None
        server = self._servers[name]
        self._numbers += 1
        version = PolicyVersion(self.incarnation, newest)
        server.transfer, server.reading = Transfer(name, version, self.slot_of(newest), self._numbers), True
        return server.transfer

    def is_to_ask(self, name: str) -> bool:
        """Whether nothing is sent to this server before it has said what it holds."""
        return self._servers[name].to_ask

    def transferred(self, transfer: Transfer) -> None:
        """The server holds every slice, checked: the slot is free, whatever its commit takes."""
        if self.is_current(transfer):
            self._servers[transfer.server].reading = False

    def retry_at(self, name: str) -> float:
        """When a server that failed may be tried again."""
        return self._servers[name].retry_at

    def is_current(self, transfer: Transfer) -> bool:
        """Whether this transfer is still wanted; one that is not must change nothing."""
        server = self._servers.get(transfer.server)
        return server is not None and server.transfer == transfer

    def confirm(self, transfer: Transfer, now: float) -> bool:
        """The server holds the version, live and, where asked for, verified. False when the transfer is off."""
        if not self.is_current(transfer):
            return False
        self._confirmed_by(self._servers[transfer.server], transfer.version, now)
        return True

    def _confirmed_by(self, server: _Server, version: PolicyVersion, now: float) -> None:
        server.transfer, server.confirmed, server.ever_confirmed = None, version, True
        server.heard_at, server.retry_at, server.reason = now, 0.0, ""
        floor = self.confirmed
        server.in_traffic = not server.retired and (server.in_traffic or floor is None or version.version >= floor)

    def refused(self, transfer: Transfer) -> None:
        """Slices arrived wrong and are sent again: STALE until the server confirms."""
        if self.is_current(transfer):
            server = self._servers[transfer.server]
            server.in_traffic, server.reason = False, f"{transfer.version} arrived wrong"

    def fail(self, transfer: Transfer, reason: str, now: float) -> None:
        """The transfer is over without a confirmation: the slot is free, the server STALE, and tried again in a second."""
        if self.is_current(transfer):
            server = self._servers[transfer.server]
            server.transfer, server.in_traffic, server.reason = None, False, reason
            server.retry_at = now + RETRY_SECONDS

    # What others see

    def version_of(self, name: str) -> int | None:
        """The version of the present incarnation that this server confirmed last."""
        server = self._servers[name]
        return server.confirmed.version if server.confirmed is not None and self._is_ours(server) else None

    def given_up(self) -> dict[str, str]:
        """Servers that do not come back, and why."""
        return {server.name: server.reason for server in self._servers.values() if server.given_up}

    @property
    def confirmed(self) -> int | None:
        """The smallest version among the servers that take traffic."""
        return min(
            (s.confirmed.version for s in self._servers.values() if s.in_traffic and s.confirmed is not None), default=None
        )

    def state_of(self, name: str) -> ServerState:
        server = self._servers[name]
        if server.retired:
            return "RETIRED"
        if server.restarting:
            return "RESTARTING"
        if server.dead:
            return "DEAD"
        if server.in_traffic:
            return "READY" if server.confirmed == PolicyVersion(self.incarnation, self.published or 0) else "UPDATING"
        return "STALE" if server.ever_confirmed or server.reason else "STARTING"

    def reason_of(self, name: str) -> str:
        """Why a server takes no traffic; empty where it does."""
        return self._servers[name].reason

    def is_confirmed(self, version: int) -> bool:
        """Whether every server that is counted on, and there is one, takes traffic with at least `version`."""
        servers = [server for server in self._servers.values() if server.is_counted_on]
        return bool(servers) and all(s.in_traffic and s.confirmed is not None and s.confirmed.version >= version for s in servers)

    def view(self) -> FleetView:
        """The fleet now; `seq` grows whenever anything in it changed since the view before."""
        servers = tuple(
            ServerView(s.name, s.url, self.state_of(s.name), self.version_of(s.name), s.load) for s in self._servers.values()
        )
        confirmed = self.confirmed
        seen = (self.incarnation, confirmed, self.published, servers)
        if seen != self._seen:
            self._seq, self._seen = self._seq + 1, seen
            routes = tuple((s.name, s.url, s.version, "in traffic" if s.takes_traffic else s.state) for s in servers)
            news = (self.incarnation, confirmed, routes)
            if news != self._news:
                self._news_seq, self._news = self._seq, news
        return FleetView(self._seq, self.incarnation, confirmed, self.published, servers)

    def has_news(self, since: int) -> bool:
        """Whether more than a publication has happened since the view of that `seq`: something by which requests are routed, or
        what is confirmed."""
        self.view()
        return self._news_seq > since

    def _is_ours(self, server: _Server) -> bool:
        return server.confirmed is not None and server.confirmed.incarnation == self.incarnation

    def _newest_complete(self) -> int | None:
        return max((slot.complete for slot in self._slots if slot.complete is not None), default=None)

    def _slots_read(self) -> set[int]:
        return {server.transfer.slot for server in self._servers.values() if server.transfer is not None and server.reading}
