"""One topic of the bounded queue: a state machine of plain values, without clock, socket or process.

    announced ──grant──▶ granted ──payload──▶ accepted ──take──▶ taken ──settle──▶ gone
     (sizes)            (credit held)        (credit held)     (leased)      ▲
                                                  ▲                │         │
                                                  └── returned ◀───┘ lease ends: first out again, in the original order

Invariants, at every moment:

- items granted and not yet sent + items accepted and never yet taken ≤ capacity_items; the same sum in bytes ≤ capacity_bytes.
  A message is outside the bound from its first taking on, also when its lease ended and it waits to be delivered again.
- A sender's messages are numbered from `first_number` on and become `handled` (accepted, dropped as a duplicate, or refused)
  strictly in that order. Credits are granted in the order of announcement, whoever announced, and nothing overtakes: nobody
  starves.
- An accepted message stays until it is settled, whoever dies.
- The topic has ended when every producer it was told of has closed; one that fell silent has not.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

from asyncrl.errors import MessageTooLarge, StreamClosed, TransportError, UnknownSender
from asyncrl.transport.blocks import Payload
from asyncrl.transport.records import Acceptance, Progress, Session, Stored, TopicSpec, TopicStats, Written

__all__ = ["Topic", "TopicSpec"]


@dataclass(slots=True)
class _Sender:
    producer: str
    last_seen: float
    announced: int = 0
    granted: int = 0
    handled: int = 0
    sizes: deque[int] = field(default_factory=deque)  # bytes of messages handled … announced − 1
    granted_bytes: int = 0
    blocked_since: float | None = None
    retired: str | None = None  # why it may send no more

    def progress(self) -> Progress:
        return Progress(self.announced, self.granted, self.handled)


class Topic:
    """See the module's docstring. `now` is seconds on any one monotonic axis; a session silent for `lease_seconds` is taken for
    dead at the next `expire`."""

    def __init__(self, spec: TopicSpec, *, lease_seconds: float):
        self.spec = spec
        self.lease_seconds = lease_seconds
        self.first_number = 0
        self._senders: dict[Session, _Sender] = {}
        self._current: dict[str, Session] = {}  # producer → its newest session
        self._closed: set[str] = set()
        self._waiting: deque[tuple[Session, int]] = deque()  # (session, announced messages without credit), oldest first
        self._granted_items = 0
        self._granted_bytes = 0
        self._ready: OrderedDict[str, Stored] = OrderedDict()
        self._ready_bytes = 0
        self._returned: OrderedDict[str, Stored] = OrderedDict()
        self._messages: dict[str, Stored] = {}
        self._groups: dict[str, set[str]] = {}
        self._consumers: dict[Session, float] = {}  # when each was last heard
        self._sequence = 0
        self._stats = TopicStats()
        self._first_accepted: float | None = None
        self.gone: list[int] = []
        """Tickets of messages that were settled, for whoever keeps the journal to take away."""

    # ── senders ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_sender(self, session: Session, producer: str, now: float) -> Progress:
        """A sender is there, or still there. A new session of a producer retires the one before and its credits.

        Raises TransportError for a producer that the topic was not told of, StreamClosed for a retired session.
        """
        sender = self._senders.get(session)
        if sender is None:
            if producer not in self.spec.producers:
                told = ", ".join(self.spec.producers) or "nobody"
                raise TransportError(f"{producer} is no producer of topic {self.spec.name}, which was told of {told}")
            if self.ended:
                raise StreamClosed(f"topic {self.spec.name} has ended: {producer} cannot open it again")
            before = self._current.get(producer)
            if before is not None:
                self._retire(self._senders[before], before, f"a newer sender named {producer} has taken over", now)
            first = self.first_number
            sender = self._senders[session] = _Sender(producer, now, first, first, first)
            self._current[producer] = session
            self._closed.discard(producer)
        return self._seen(session, now).progress()

    def announce(self, session: Session, first: int, sizes: Sequence[int], now: float) -> Progress:
        """The sender has messages number `first` on waiting, of these sizes in bytes. What was announced before is skipped;
        after a gap nothing is taken (the sender sees it from the counts and announces again).

        Raises MessageTooLarge when one could never fit, StreamClosed for a retired session; then nothing is announced.
        """
        sender = self._seen(session, now)
        if first > sender.announced:
            return sender.progress()
        fresh = sizes[sender.announced - first :]
        if fresh and max(fresh) > self.spec.capacity_bytes:
            raise MessageTooLarge(
                f"a message of {max(fresh)} bytes can never fit topic {self.spec.name}, which holds {self.spec.capacity_bytes}: "
                "raise queue.capacity_megabytes"
            )
        if fresh:
            sender.sizes.extend(fresh)
            sender.announced += len(fresh)
            self._waiting.append((session, len(fresh)))
            if sender.blocked_since is None:
                sender.blocked_since = now
        return sender.progress()

    def grant(self, now: float) -> list[Session]:
        """Give the capacity that is free to announced messages, oldest announcement first; returns the senders that got some."""
        granted_to: dict[Session, None] = {}
        items_left = self.spec.capacity_items - self._granted_items - len(self._ready)
        bytes_left = self.spec.capacity_bytes - self._granted_bytes - self._ready_bytes
        while self._waiting and items_left > 0:
            session, count = self._waiting[0]
            sender = self._senders[session]
            given = given_bytes = 0
            offset = sender.granted - sender.handled
            for size in islice(sender.sizes, offset, offset + min(count, items_left)):
                if given_bytes + size > bytes_left:
                    break
                given, given_bytes = given + 1, given_bytes + size
            if given == 0:
                break
            items_left, bytes_left = items_left - given, bytes_left - given_bytes
            self._hold_credit(sender, given, given_bytes)
            granted_to[session] = None
            if sender.granted == sender.announced:
                self._unblock(sender, now)
            if given < count:
                self._waiting[0] = (session, count - given)
            else:
                self._waiting.popleft()
        return list(granted_to)

    def accept(
        self, session: Session, first: int, batch: Sequence[Written], now: float, *, is_ended: Callable[[str], bool]
    ) -> Acceptance:
        """The sender wrote messages number `first` on. What is granted and in turn is accepted; `is_ended(group_id)` marks
        duplicates, as does an id that is here already. Messages handled before are skipped.

        Raises StreamClosed for a retired session.
        """
        sender = self._seen(session, now)
        handled = sender.handled
        in_turn = batch[handled - first : sender.granted - first] if first <= handled else ()
        result = Acceptance(out_of_turn=first + len(batch) > handled + len(in_turn))
        sizes = [sender.sizes.popleft() for _ in in_turn]
        self._spend_credit(sender, len(in_turn), sum(sizes))
        bytes_before = self._ready_bytes
        ended = {group_id: is_ended(group_id) for group_id in {group_id for _, group_id, _ in in_turn}}
        for number, ((message_id, group_id, payload), size) in enumerate(zip(in_turn, sizes, strict=True), handled):
            if len(payload) != size:
                result.refused.append((number, f"{size} bytes were announced, {len(payload)} came"))
            elif message_id in self._messages or ended[group_id]:
                result.duplicates += 1
            else:
                self._store(message_id, group_id, payload, size)
                result.accepted.append((message_id, group_id))
        self._count(result, self._ready_bytes - bytes_before)
        if self._first_accepted is None and result.accepted:
            self._first_accepted = now
        return result

    def progress(self, session: Session) -> Progress | None:
        """The sender's counts; None for a session that was never opened."""
        sender = self._senders.get(session)
        return None if sender is None else sender.progress()

    def close_sender(self, session: Session, now: float) -> None:
        """End of this sender's stream; its producer has closed if no newer session took over. Closing twice is harmless. Raises
        UnknownSender for a session that was never opened."""
        sender = self._senders.get(session)
        if sender is None:
            raise self._unknown()
        if sender.retired is None:
            self._retire(sender, session, f"the sender {sender.producer} has closed", now)
            self._closed.add(sender.producer)

    @property
    def closed_producers(self) -> frozenset[str]:
        """Producers whose stream has ended."""
        return frozenset(self._closed)

    def restore_closed(self, producers: Iterable[str]) -> None:
        """Streams that had ended when an earlier process kept this topic; before anybody is served."""
        self._closed.update(producers)

    @property
    def ended(self) -> bool:
        """Every producer the topic was told of has closed."""
        return bool(self.spec.producers) and self._closed.issuperset(self.spec.producers)

    @property
    def drained(self) -> bool:
        """The topic has ended and nothing in it waits to be taken."""
        return self.ended and not self._ready and not self._returned

    # ── consumers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def touch_consumer(self, session: Session, now: float) -> None:
        """A heartbeat: this consumer keeps its leases."""
        self._consumers[session] = now

    @property
    def num_takeable(self) -> int:
        return len(self._returned) + len(self._ready)

    def take(self, session: Session, *, max_items: int, max_bytes: int, now: float) -> list[Stored]:
        """Lease messages to this consumer: those returned first, then in order of acceptance; at most `max_items`, and no more
        than `max_bytes` unless it is a single one. Each taking frees its sender's credit."""
        self.touch_consumer(session, now)
        taken: list[Stored] = []
        size = 0
        while len(taken) < max_items and (source := self._returned or self._ready):
            message_id, stored = source.popitem(last=False)
            size += stored.size
            if taken and size > max_bytes:
                source[message_id] = stored
                source.move_to_end(message_id, last=False)
                break
            if stored.state == "accepted":
                self._ready_bytes -= stored.size
            else:
                stored.redelivered = True
                self._stats.redelivered += 1
            stored.state, stored.holder = "taken", session
            taken.append(stored)
        self._stats.taken += len(taken)
        return taken

    def settle(self, message_ids: Iterable[str]) -> int:
        """These messages are done with, in whatever state; returns how many were here."""
        settled = 0
        for message_id in message_ids:
            stored = self._messages.pop(message_id, None)
            if stored is not None:
                group = self._groups[stored.group_id]
                group.discard(message_id)
                if not group:
                    del self._groups[stored.group_id]
                self._forget(stored)
                settled += 1
        self._stats.settled += settled
        return settled

    def settle_group(self, group_id: str) -> int:
        """Every message of this group is done with; returns how many were here."""
        group = self._groups.pop(group_id, ())
        for message_id in group:
            self._forget(self._messages.pop(message_id))
        self._stats.settled += len(group)
        return len(group)

    def restore(self, message_id: str, group_id: str, size: int, ticket: int, *, taken: bool) -> None:
        """A message that an earlier process accepted, whose payload lies in the journal; in the order of acceptance. One that was
        taken is outside the bound, and is delivered again before the others."""
        stored = Stored(self._sequence, message_id, group_id, None, size, "returned" if taken else "accepted", ticket=ticket)
        self._sequence += 1
        self._messages[message_id] = stored
        self._groups.setdefault(group_id, set()).add(message_id)
        if taken:
            self._returned[message_id] = stored
        else:
            self._ready[message_id] = stored
            self._ready_bytes += size

    def give_back(self, session: Session, message_ids: Iterable[str] | None = None) -> int:
        """This consumer's leases (all, or of these messages) end; what was not settled is delivered again, first, in the
        original order. Returns how many."""
        ids = self._messages if message_ids is None else message_ids
        found = [stored for message_id in ids if (stored := self._messages.get(message_id)) is not None]
        back = [stored for stored in found if stored.holder == session]
        for stored in back:
            stored.state, stored.holder = "returned", None
        merged = sorted([*self._returned.values(), *back], key=lambda stored: stored.sequence)
        self._returned = OrderedDict((stored.message_id, stored) for stored in merged)
        self._stats.leases_ended += len(back)
        return len(back)

    def close_consumer(self, session: Session) -> None:
        """The consumer leaves and gives its leases back."""
        self.give_back(session)
        self._consumers.pop(session, None)

    # ── time and figures ─────────────────────────────────────────────────────────────────────────────────────────────

    def expire(self, now: float) -> list[Session]:
        """End the leases and credits of sessions silent for more than `lease_seconds`; returns those sessions. A sender that
        speaks again goes on from its `handled` count, a consumer starts with nothing held."""
        limit = now - self.lease_seconds
        silent_senders = [
            session
            for session, sender in self._senders.items()
            if sender.last_seen < limit and sender.announced > sender.handled and sender.retired is None
        ]
        for session in silent_senders:
            self._withdraw(self._senders[session], session, now)
        silent_consumers = [session for session, last_seen in self._consumers.items() if last_seen < limit]
        for session in silent_consumers:
            self.close_consumer(session)
        return silent_senders + silent_consumers

    def refuse(self) -> None:
        """Count a frame or payload of this topic that was no message."""
        self._stats.refused += 1

    def find(self, message_id: str) -> Stored | None:
        """The unsettled message of this id."""
        return self._messages.get(message_id)

    def unsettled(self) -> list[Stored]:
        """Every accepted message that is not settled, in order of acceptance."""
        return list(self._messages.values())

    def stats(self, now: float) -> TopicStats:
        """Figures at this moment, waits in progress included."""
        current = TopicStats(**asdict(self._stats))
        current.depth, current.bytes = len(self._ready), self._ready_bytes
        current.waiting = sum(count for _, count in self._waiting)
        current.returned = len(self._returned)
        current.held = len(self._messages) - len(self._ready) - len(self._returned)
        current.blocked_seconds += sum(
            now - sender.blocked_since for sender in self._senders.values() if sender.blocked_since is not None
        )
        seconds = now - self._first_accepted if self._first_accepted is not None else 0.0
        if seconds > 0:
            current.accepted_per_second, current.bytes_per_second = current.accepted / seconds, current.accepted_bytes / seconds
        return current

    @property
    def committed(self) -> tuple[int, int]:
        """(items, bytes) that count against the capacity: granted and not yet sent + accepted and never yet taken."""
        return self._granted_items + len(self._ready), self._granted_bytes + self._ready_bytes

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _seen(self, session: Session, now: float) -> _Sender:
        sender = self._senders.get(session)
        if sender is None:
            raise self._unknown()
        if sender.retired is not None:
            raise StreamClosed(f"topic {self.spec.name}: {sender.retired}")
        sender.last_seen = now
        return sender

    def _unknown(self) -> UnknownSender:
        return UnknownSender(f"topic {self.spec.name} does not know this sender: open it first")

    def _hold_credit(self, sender: _Sender, items: int, size: int) -> None:
        sender.granted += items
        sender.granted_bytes += size
        self._granted_items += items
        self._granted_bytes += size

    def _spend_credit(self, sender: _Sender, items: int, size: int) -> None:
        sender.handled += items
        sender.granted_bytes -= size
        self._granted_items -= items
        self._granted_bytes -= size

    def _store(self, message_id: str, group_id: str, payload: Payload, size: int) -> None:
        self._messages[message_id] = self._ready[message_id] = Stored(self._sequence, message_id, group_id, payload, size)
        self._sequence += 1
        self._ready_bytes += size
        group = self._groups.get(group_id)
        if group is None:
            self._groups[group_id] = {message_id}
        else:
            group.add(message_id)

    def _count(self, result: Acceptance, size: int) -> None:
        """One write was handled, `size` bytes of it accepted."""
        stats = self._stats
        stats.refused += len(result.refused)
        stats.duplicates += result.duplicates
        stats.accepted += len(result.accepted)
        stats.accepted_bytes += size
        stats.max_depth = max(stats.max_depth, len(self._ready))
        stats.max_bytes = max(stats.max_bytes, self._ready_bytes)

    def _forget(self, stored: Stored) -> None:
        """A message that is settled leaves the line it stands in, and the journal."""
        if stored.ticket:
            self.gone.append(stored.ticket)
        if stored.state == "accepted":
            del self._ready[stored.message_id]
            self._ready_bytes -= stored.size
        elif stored.state == "returned":
            del self._returned[stored.message_id]

    def _withdraw(self, sender: _Sender, session: Session, now: float) -> None:
        """Forget what the sender announced and was granted beyond what it sent."""
        self._granted_items -= sender.granted - sender.handled
        self._granted_bytes -= sender.granted_bytes
        sender.announced = sender.granted = sender.handled
        sender.granted_bytes = 0
        sender.sizes.clear()
        self._waiting = deque(entry for entry in self._waiting if entry[0] != session)
        self._unblock(sender, now)

    def _retire(self, sender: _Sender, session: Session, reason: str, now: float) -> None:
        if sender.retired is None:
            self._withdraw(sender, session, now)
            sender.retired = reason

    def _unblock(self, sender: _Sender, now: float) -> None:
        if sender.blocked_since is not None:
            self._stats.blocked_seconds += now - sender.blocked_since
            sender.blocked_since = None
