"""ParameterSync's line to one receiver: one version in, verified or refused, each move with a deadline.

BEGIN and FETCH are sent together, and so are COMMIT and DIGEST: the receiver executes in order, and refuses a FETCH whose BEGIN
was refused, and a DIGEST whose COMMIT was.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import zmq

from asyncrl.errors import DeadlineExceeded, DigestMismatch, MalformedFrame, PlanMismatch, StaleIncarnation, SyncError
from asyncrl.protocols.weights import KvPolicy, PolicyVersion
from asyncrl.transport.loop_socket import Frames, LoopSocket, open_socket
from asyncrl.weight_sync.plan import Plan, buckets, single
from asyncrl.weight_sync.slots import SlotMaps
from asyncrl.weight_sync.wire import Checksums, Kind, check_reply, checksums_from_wire, checksums_to_wire, pack, unpack

Carrier = Literal["shared_memory", "zeromq"]
Unverified = Literal["differs", "failed", "unanswered", "unasked"]
Answer = asyncio.Future[dict[str, Any]]
BUCKETS_UNDERWAY = 4
RESENDS = 3
_MAX_REPLY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Order:
    """One version for one server. `slots` are the names of the ranks' staging slots, `checksums` those of the publisher, taken
    after the cast; `bytes_per_second` None is full speed."""

    version: PolicyVersion
    plan: Plan
    slots: tuple[str, ...]
    checksums: Checksums
    carrier: Carrier
    kv_policy: KvPolicy
    verify: bool
    bucket_bytes: int
    bytes_per_second: float | None
    timeout_seconds: float


@dataclass
class Outcome:
    """What an update cost. transfer_seconds: from the first message until every slice was in and checked; pause_seconds: the
    decode loop held; verified: the live digest equalled the publisher's (None: not asked); refused: slices that arrived wrong."""

    transfer_seconds: float = 0.0
    pause_seconds: float = 0.0
    recompute_seconds: float = 0.0
    num_bytes: int = 0
    refused: int = 0
    verified: bool | None = None


@dataclass(frozen=True)
class Progress:
    """Who hears of an update on its way. refused: so many slices arrived wrong and are sent again; transferred: the slots are not
    needed any more; unverified: the version is live, or may be, and its digest was not found equal: it differs, the commit failed
    half-way, no answer came (the server's process ended, or was too slow), or nobody asked."""

    refused: Callable[[int], None] = lambda count: None
    transferred: Callable[[], None] = lambda: None
    unverified: Callable[[Unverified], None] = lambda reason: None


NOBODY = Progress()


class ReceiverChannel:
    """Speaks to the receiver at `address`. Lives on one event loop. `when_lost` is called when the connection breaks: its process
    has ended, most likely; the channel connects again by itself."""

    def __init__(self, address: str):
        self.address = address
        self.when_lost: Callable[[], None] = lambda: None
        socket = open_socket(zmq.DEALER, max_frame_bytes=_MAX_REPLY_BYTES)
        self._socket = LoopSocket(socket, self._on_batch)
        self._end_monitor = socket.disable_monitor
        self._monitor = LoopSocket(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED), lambda _: self.when_lost())
        socket.connect(address)
        self._requests = itertools.count(1)
        self.bad_frames = 0
        self._calls: dict[int, tuple[Kind, Answer]] = {}
        self._known_plan = ("", "")  # (session, plan id) that the receiver was sent last
        self._session = ""
        self._maps = SlotMaps()

    async def status(self, timeout: float) -> dict[str, Any]:
        """What the receiver holds: session, committed, begun, counters. Raises DeadlineExceeded."""
        return await self._wait(self._send("STATUS", PolicyVersion(0, 0)), timeout)

    async def check(self, order: Order) -> None:
        """Compare what is live there, whoever brought it, with what was published. Raises DigestMismatch, or as `update`."""
        for known in (self._known_plan == (self._session, order.plan.id), False):
            plan = None if known else order.plan.to_wire()
            answer = await self._wait(self._send("CHECK", order.version, plan_id=order.plan.id, plan=plan), order.timeout_seconds)
            if answer.get("error") != "unknown_plan":
                _compare(order, checksums_from_wire(_checked(answer)["checksums"]))
                self._known_plan = (self._session, order.plan.id)
                return
        raise SyncError(f"the receiver at {self.address} does not take plan {order.plan.id}")

    def cancel(self, version: PolicyVersion) -> None:
        """Tell the receiver to give `version` up; nobody waits for the answer."""
        self._send("CANCEL", version)

    async def update(self, order: Order, progress: Progress = NOBODY) -> Outcome:
        """Transfer, commit, verify.

        Raises DeadlineExceeded past a move's deadline, DigestMismatch when slices keep arriving wrong or the live digest
        differs, StaleIncarnation, PlanMismatch, SyncError; in all these the version is not confirmed.
        """
        outcome = Outcome()
        began = time.monotonic()
        try:
            async with asyncio.timeout(order.timeout_seconds):
                await self._transfer(order, outcome, progress)
        except TimeoutError:
            raise not_in_time(order, self.address) from None
        outcome.transfer_seconds = time.monotonic() - began
        progress.transferred()
        await self._commit(order, outcome, progress)
        return outcome

    async def close(self) -> None:
        for _, answer in list(self._calls.values()):
            answer.cancel()
        self._end_monitor()
        self._monitor.close()
        self._socket.close()
        self._maps.close()

    async def _commit(self, order: Order, outcome: Outcome, progress: Progress) -> None:
        """Make the version live and compare its digest."""
        commit = self._send("COMMIT", order.version, kv_policy=order.kv_policy)
        digest = self._send("DIGEST", order.version) if order.verify else None
        why: Unverified | None = "unanswered" if order.verify else "unasked"
        try:
            answer = await self._wait(commit, order.timeout_seconds)
            if (error := answer.get("error")) is not None:
                why = "failed" if error == "failed" else None
            report = _checked(answer)
            outcome.pause_seconds, outcome.recompute_seconds = report["pause_seconds"], report["recompute_seconds"]
            if digest is not None:
                live = checksums_from_wire(_checked(await self._wait(digest, order.timeout_seconds))["checksums"])
                why = "differs"
                _compare(order, live)
                why, outcome.verified = None, True
        finally:
            if why is not None:
                progress.unverified(why)

    async def _transfer(self, order: Order, outcome: Outcome, progress: Progress) -> None:
        """Until the receiver holds every slice, checked."""
        fetched = await self._begin(order, fetch=order.carrier == "shared_memory")
        indices: Sequence[int] | None = None  # all
        for _ in range(1 + RESENDS):
            if order.carrier == "zeromq":
                refused, num_bytes = await self._push(order, indices)
            else:
                moved = _checked(await (fetched or self._fetch(order, indices)))
                refused, num_bytes, fetched = list(moved["refused"]), int(moved["bytes"]), None
            if max(refused, default=0) >= len(order.plan.slices):
                raise SyncError(f"the receiver at {self.address} names slice {max(refused)} of {len(order.plan.slices)}")
            outcome.num_bytes += num_bytes
            if not refused:
                return
            outcome.refused += len(refused)
            progress.refused(len(refused))
            indices = refused
        raise DigestMismatch(
            f"{order.version}: {len(refused)} slices arrived wrong {1 + RESENDS} times at {self.address}: see whether something "
            "else writes to the staging slots or alters traffic"
        )

    async def _begin(self, order: Order, *, fetch: bool = False) -> Answer | None:
        """Announce the version, with the plan where this receiver may not know it. fetch: have it read every slice besides, and
        return what it will answer."""
        for known in (self._known_plan == (self._session, order.plan.id), False):
            plan = None if known else order.plan.to_wire()
            begun = self._send("BEGIN", order.version, plan_id=order.plan.id, plan=plan)
            fetched = self._fetch(order, None) if fetch else None
            answer = await begun
            if answer.get("error") != "unknown_plan":
                _checked(answer)
                self._known_plan = (self._session, order.plan.id)
                return fetched
        raise SyncError(f"the receiver at {self.address} does not take plan {order.plan.id}")

    def _fetch(self, order: Order, indices: Sequence[int] | None) -> Answer:
        """Have the receiver read the slots itself: it answers with the slices that arrived wrong, and bytes moved."""
        return self._send(
            "FETCH",
            order.version,
            slots=list(order.slots),
            slices=None if indices is None else list(indices),
            checksums=checksums_to_wire(order.checksums),
            bytes_per_second=order.bytes_per_second,
        )

    async def _push(self, order: Order, indices: Sequence[int] | None) -> tuple[list[int], int]:
        """Send buckets from the slots, a few underway at a time, at the order's pace."""
        pieces = buckets(order.plan, order.bucket_bytes) if indices is None else [single(order.plan, index) for index in indices]
        slots = [self._maps.open(name) for name in order.slots]
        began, num_bytes = time.monotonic(), 0
        underway: deque[asyncio.Future[dict[str, Any]]] = deque()
        refused: list[int] = []
        for bucket in pieces:
            if len(underway) >= BUCKETS_UNDERWAY:
                refused += _checked(await underway.popleft())["refused"]
            payload = slots[bucket.rank][bucket.slot_offset : bucket.slot_offset + bucket.num_bytes]
            covered = order.checksums[bucket.first : bucket.first + bucket.count]
            wire = checksums_to_wire(covered)
            underway.append(self._send("BUCKET", order.version, payload, first=bucket.first, count=bucket.count, checksums=wire))
            num_bytes += bucket.num_bytes
            if order.bytes_per_second is not None:
                await asyncio.sleep(max(0.0, began + num_bytes / order.bytes_per_second - time.monotonic()))
        for answer in underway:
            refused += _checked(await answer)["refused"]
        return refused, num_bytes

    def _send(self, kind: Kind, version: PolicyVersion, payload: memoryview | None = None, **fields: Any) -> Answer:
        request = next(self._requests)
        header = {"kind": kind, "request": request, "incarnation": version.incarnation, "version": version.version, **fields}
        answer: Answer = asyncio.get_running_loop().create_future()
        self._calls[request] = kind, answer
        answer.add_done_callback(lambda _: self._calls.pop(request, None))
        self._socket.send([pack(header)] if payload is None else [pack(header), payload])
        return answer

    async def _wait(self, answer: Answer, timeout: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"the receiver at {self.address} did not answer within {timeout:g} s (sync.timeout_seconds)"
            ) from None

    def _on_batch(self, batch: list[Frames]) -> None:
        for frames in batch:
            try:
                header = unpack(frames[0])
                request = header.get("request")
                kind, answer = (self._calls.get(request) if type(request) is int else None) or (None, None)
                if kind is None or answer is None or answer.done():
                    continue  # its caller gave up
                check_reply(kind, header)
            except MalformedFrame:
                self.bad_frames += 1  # no reply of ours: whoever waits for one runs into its deadline
                continue
            self._session = header["session"]
            answer.set_result(header)


def staged_line(name: str, http: str, weights: str) -> ReceiverChannel:
    """The line to the server `name`, whose receiver is at `weights`."""
    return ReceiverChannel(weights)


def not_in_time(order: Order, where: str) -> DeadlineExceeded:
    """For a version whose transfer took longer than it may."""
    return DeadlineExceeded(
        f"{order.version}: {order.plan.num_bytes / 1e6:.1f} MB did not reach {where} within {order.timeout_seconds:g} s: raise "
        "sync.timeout_seconds or sync.max_megabytes_per_second"
    )


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the error that it stands for."""
    match answer.get("error"):
        case None:
            return answer
        case "stale_incarnation":
            raise StaleIncarnation(answer["text"])
        case "plan_mismatch":
            raise PlanMismatch(answer["text"])
        case error:
            raise SyncError(f"{error}: {answer.get('text', '')}")


def _compare(order: Order, live: Checksums) -> None:
    differing = np.flatnonzero(live != order.checksums) if len(live) == len(order.checksums) else np.arange(1)
    if len(differing):
        name = order.plan.tensors[order.plan.slices[int(differing[0])].tensor].name
        raise DigestMismatch(
            f"{order.version}: {len(differing)} slices of the live parameters differ from those sent, first {name}"
        )
