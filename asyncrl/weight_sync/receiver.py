"""The receiver inside a server process: takes new versions in while the server decodes, and swaps them in between two steps.

    ParameterSync ──ROUTER──▶ listener thread ──(in order)──▶ worker thread ──▶ staging tensors ──commit──▶ WeightTarget
                  ◀─────────── listener thread ◀──inproc────── worker thread

    thread    consumes          waits for                       is unblocked by
    listener  messages          its socket or a reply           ParameterSync, the worker
    worker    queued messages   a message; the throttle;        the listener; time;
                                the decode step inside commit   the server's decode loop

STATUS and CANCEL are executed by the listener, at once; everything else by the worker, in order. Neither thread decodes. Only
the worker touches staging tensors; only `WeightTarget.commit` touches live ones. Loads torch, numpy, pyzmq and msgpack only.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from asyncrl.errors import MalformedFrame, PlanMismatch, SyncError
from asyncrl.protocols.weights import PolicyVersion, WeightTarget
from asyncrl.transport import security
from asyncrl.weight_sync.plan import Plan
from asyncrl.weight_sync.slots import SlotMaps
from asyncrl.weight_sync.staging import Bytes, Pace, Staging, Superseded, check_plan, live_checksums
from asyncrl.weight_sync.wire import (
    CHECKSUM_BYTES,
    Checksums,
    check_request,
    checksums_from_wire,
    checksums_to_wire,
    digest_of,
    pack,
    unpack,
)

log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
_MAX_MESSAGE_BYTES = 2**32
PORTS = range(20_000, 32_000)  # outside the ranges from which systems draw ports for outgoing connections
_Job = tuple[bytes, dict[str, Any], Bytes]


class Refused(Exception):
    """A message that changes nothing, and why: a word of wire.ERRORS."""

    def __init__(self, error: str, text: str):
        self.error = error
        super().__init__(text)


class WeightReceiver:
    """One server's receiver. `start` binds and returns the address; a new receiver has a new `session`, by which ParameterSync
    sees that the server began anew."""

    def __init__(self, target: WeightTarget, *, bind: str = "tcp://127.0.0.1:*"):
        self.session = secrets.token_hex(8)
        self._executor = _Executor(target)
        self._bind = bind
        self._context = zmq.Context()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._malformed = 0
        self._wake_address = f"inproc://{self.session}"

    def start(self, bind: str | None = None) -> str:
        """Bind, here or where the constructor said, and start both threads; the bound address."""
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, 0)
        router.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.RCVHWM, 0)
        door = security.door()
        door.guard(router, serves=True)
        address = door.place(bind or self._bind)
        if address.endswith(":*"):
            router.bind_to_random_port(address[: -len(":*")], min_port=PORTS.start, max_port=PORTS.stop, max_tries=len(PORTS))
        else:
            router.bind(address)
        address = door.known_as(bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
        replies = self._context.socket(zmq.PULL)
        replies.bind(self._wake_address)
        self._threads = [
            threading.Thread(target=self._listen, args=(router, replies), name="weights-listen", daemon=True),
            threading.Thread(target=self._work, name="weights-work", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return address

    @property
    def alive(self) -> bool:
        """False once a thread ended by itself: no version would ever arrive again."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """End both threads; a version being read is given up."""
        if not self._threads:
            return
        self._executor.cancel(None)
        self._jobs.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):  # else a commit hangs: daemon threads end with the process
            security.dismiss(self._context)
            self._context.term()
        self._threads = []

    def _listen(self, router: zmq.Socket[bytes], replies: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(replies, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if replies in ready:
                    frames = replies.recv_multipart()
                    if len(frames) == 1:  # the worker's last word
                        return
                    router.send_multipart(frames)
                if router in ready:
                    self._on_message(router, router.recv_multipart(copy=False))
        finally:
            router.close()
            replies.close()

    def _on_message(self, router: zmq.Socket[bytes], frames: list[zmq.Frame]) -> None:
        peer = frames[0].bytes
        try:
            header, payload = _parse(frames)
        except MalformedFrame as error:
            self._malformed += 1
            router.send_multipart([peer, pack({"request": None, "error": "malformed", "text": str(error)})])
            return
        if header["kind"] == "STATUS":
            status = {**self._executor.status(), "malformed": self._malformed}
            router.send_multipart([peer, self._reply(header, {"ok": True, **status})])
        elif header["kind"] == "CANCEL":
            self._executor.cancel(_version_of(header))
            router.send_multipart([peer, self._reply(header, {"ok": True})])
        else:
            if header["kind"] == "BEGIN":
                self._executor.announce(_version_of(header))
            self._jobs.put((peer, header, payload))

    def _work(self) -> None:
        replies = self._context.socket(zmq.PUSH)
        replies.connect(self._wake_address)
        while (job := self._jobs.get()) is not None:
            peer, header, payload = job
            replies.send_multipart([peer, self._reply(header, self._executor.execute(header, payload))])
            del job, payload
        replies.send(b"")
        replies.close(linger=int(_CLOSE_SECONDS * 1000))

    def _reply(self, header: dict[str, Any], answer: dict[str, Any]) -> bytes:
        return pack({"request": header["request"], "session": self.session, **answer})


class _Executor:
    """What the messages do. `execute` runs on the worker; `status`, `cancel` and `announce` on the listener."""

    def __init__(self, target: WeightTarget):
        self._target = target
        self._staging: Staging | None = None
        self._plans: dict[str, Plan] = {}
        self._plan: Plan | None = None
        self._slots = SlotMaps()
        self._incarnation = 0  # the newest that ever began
        self._committed: PolicyVersion | None = None
        self._digest_of_live: tuple[PolicyVersion, str] | None = None  # as computed last from the live parameters
        self._wanted: PolicyVersion | None = None  # written by the listener, read by the worker between two pieces
        self._refused_slices = 0
        self._received_bytes = 0
        self._steps: dict[str, Callable[[PolicyVersion, dict[str, Any], Bytes], dict[str, Any]]] = {
            "BEGIN": self._begin,
            "FETCH": self._fetch,
            "BUCKET": self._bucket,
            "COMMIT": self._commit,
            "DIGEST": self._digest,
            "CHECK": self._check,
        }

    def status(self) -> dict[str, Any]:
        staging = self._staging
        begun = staging.version if staging is not None else None
        committed, digest = self._committed, self._digest_of_live
        return {
            "committed": None if committed is None else str(committed),
            "digest": digest[1] if digest is not None and digest[0] == committed else None,
            "begun": None if begun is None else str(begun),
            "refused_slices": self._refused_slices,
            "received_bytes": self._received_bytes,
        }

    def announce(self, version: PolicyVersion) -> None:
        """`version` waits to begin: whatever else is being read is not wanted any more, unless it is of a newer incarnation."""
        if self._wanted is None or version.incarnation >= self._wanted.incarnation:
            self._wanted = version

    def withdraw(self, version: PolicyVersion) -> None:
        """`version` did not begin: what had begun before is wanted again."""
        if self._wanted == version:
            self._wanted = self._staging.version if self._staging is not None else None

    def cancel(self, version: PolicyVersion | None) -> None:
        """Give `version` up if it is being read; None gives up whatever is."""
        if version is None or version == self._wanted:
            self._wanted = None

    def execute(self, header: dict[str, Any], payload: Bytes) -> dict[str, Any]:
        began = time.monotonic()
        try:
            answer = self._steps[header["kind"]](_version_of(header), header, payload)
        except Refused as refusal:
            return {"error": refusal.error, "text": str(refusal)}
        except Superseded:
            return {"error": "superseded", "text": "a newer version began, or this one was cancelled"}
        except PlanMismatch as error:
            return {"error": "plan_mismatch", "text": str(error)}
        except SyncError as error:
            return {"error": "failed", "text": str(error)}
        except Exception as error:  # the boundary of the server process: it goes on decoding, and ParameterSync reads the reason
            log.exception("%s failed", header["kind"])
            return {"error": "failed", "text": f"{type(error).__name__}: {error}"}
        return {"ok": True, "seconds": time.monotonic() - began, **answer}

    def _begin(self, version: PolicyVersion, header: dict[str, Any], _: Bytes) -> dict[str, Any]:
        """Changes nothing when it raises."""
        try:
            plan = self._plan_for(version, header)
        except BaseException:
            self.withdraw(version)
            raise
        assert self._staging is not None
        self._incarnation, self._plan = version.incarnation, plan
        self._staging.begin(plan, version)
        return {}

    def _plan_for(self, version: PolicyVersion, header: dict[str, Any]) -> Plan:
        """The plan that BEGIN names, fit for what is live here."""
        if version.incarnation < self._incarnation:
            raise Refused("stale_incarnation", f"incarnation {version.incarnation} is over, {self._incarnation} has begun")
        if self._committed is not None and version < self._committed:
            raise Refused("old_version", f"{self._committed} is live, {version} is older")
        plan = self._known_plan(header)
        if plan is not self._plan:
            self._staging = self._staging or Staging(self._target.spare())
        return plan

    def _known_plan(self, header: dict[str, Any]) -> Plan:
        """The plan that comes with a message, or that an earlier one brought; it fits the live parameters."""
        sent = header.get("plan")
        plan = Plan.from_wire(sent) if sent is not None else self._plans.get(header["plan_id"])
        if plan is None:
            raise Refused("unknown_plan", f"plan {header['plan_id']} was never sent to this receiver")
        if plan.id not in self._plans:
            self._target.find({spec.name: spec.shape for spec in plan.tensors})
            check_plan(plan, self._target.live())
        self._plans = {plan.id: plan}
        return plan

    def _fetch(self, version: PolicyVersion, header: dict[str, Any], _: Bytes) -> dict[str, Any]:
        plan, staging = self._begun(version)
        indices = range(len(plan.slices)) if header.get("slices") is None else header["slices"]
        checksums = _checksums(header, of=len(plan.slices)).tolist()
        if len(header["slots"]) != len(plan.slot_bytes) or max(indices, default=0) >= len(plan.slices):
            raise Refused("malformed", f"the plan has {len(plan.slot_bytes)} slots and {len(plan.slices)} slices")
        sources = [np.frombuffer(self._slots.open(name), dtype=np.uint8) for name in header["slots"]]
        pace = self._pace(version, header.get("bytes_per_second"))
        refused, num_bytes = [], 0
        for index in indices:
            piece = plan.slices[index]
            source = sources[piece.rank][piece.slot_offset : piece.slot_offset + piece.num_bytes]
            if not staging.write(index, source, checksums[index], pace):
                refused.append(index)
            num_bytes += piece.num_bytes
        return self._received(refused, num_bytes)

    def _bucket(self, version: PolicyVersion, header: dict[str, Any], payload: Bytes) -> dict[str, Any]:
        plan, staging = self._begun(version)
        first, count = header["first"], header["count"]
        checksums = _checksums(header, of=count).tolist()
        if not 0 < count <= len(plan.slices) - first:
            raise Refused(
                "malformed", f"a bucket holds slices of the {len(plan.slices)} of the plan, not {count} from {first} on"
            )
        begin = plan.slices[first].slot_offset
        pace = self._pace(version, None)  # the sender keeps the pace
        refused = []
        for index in range(first, first + count):
            piece = plan.slices[index]
            source = payload[piece.slot_offset - begin : piece.slot_offset - begin + piece.num_bytes]
            if not staging.write(index, source, checksums[index - first], pace):
                refused.append(index)
        return self._received(refused, len(payload))

    def _commit(self, version: PolicyVersion, header: dict[str, Any], _: Bytes) -> dict[str, Any]:
        staging = self._begun(version)[1]
        if not staging.complete:
            raise Refused("incomplete", f"{staging.num_missing} slices of {version} are missing or were refused")
        staged = staging.tensors
        staging.forget()  # from here on the memory is the target's,
        self._committed = self._digest_of_live = None  # and until it returns nobody can say what is live
        report = self._target.commit(staged, version, header["kv_policy"])
        self._committed = version
        return {"pause_seconds": report.pause_seconds, "recompute_seconds": report.recompute_seconds}

    def _digest(self, version: PolicyVersion, _header: dict[str, Any], _: Bytes) -> dict[str, Any]:
        if self._committed != version or self._plan is None or self._staging is None:
            raise Refused("not_committed", f"{self._committed} is live, not {version}")
        checksums: Checksums = live_checksums(self._plan, self._target.live(), Pace(), self._staging.slices)
        self._digest_of_live = version, digest_of(checksums)
        return {"checksums": checksums_to_wire(checksums)}

    def _check(self, version: PolicyVersion, header: dict[str, Any], _: Bytes) -> dict[str, Any]:
        plan = self._known_plan(header)
        return {"checksums": checksums_to_wire(live_checksums(plan, self._target.live(), Pace()))}

    def _begun(self, version: PolicyVersion) -> tuple[Plan, Staging]:
        if self._staging is None or self._plan is None or self._staging.version != version:
            begun = self._staging.version if self._staging is not None else None
            if begun is not None and version.incarnation < self._incarnation:
                raise Refused("stale_incarnation", f"incarnation {version.incarnation} is over, {self._incarnation} has begun")
            raise Refused("not_begun", f"{version} has not begun here (begun: {begun}, live: {self._committed})")
        return self._plan, self._staging

    def _pace(self, version: PolicyVersion, bytes_per_second: float | None) -> Pace:
        pace = Pace(bytes_per_second, lambda: self._wanted == version)
        pace.spend(0)
        return pace

    def _received(self, refused: list[int], num_bytes: int) -> dict[str, Any]:
        self._refused_slices += len(refused)
        self._received_bytes += num_bytes
        return {"refused": refused, "bytes": num_bytes}


def _checksums(header: dict[str, Any], *, of: int) -> Checksums:
    data: bytes = header["checksums"]
    if len(data) != CHECKSUM_BYTES * of:
        raise Refused("malformed", f"{of} checksums have {CHECKSUM_BYTES * of} bytes, not {len(data)}")
    return checksums_from_wire(data)


def _version_of(header: dict[str, Any]) -> PolicyVersion:
    return PolicyVersion(header["incarnation"], header["version"])


def _parse(frames: list[zmq.Frame]) -> tuple[dict[str, Any], Bytes]:
    if len(frames) not in (2, 3):
        raise MalformedFrame(f"a message has a header and at most one frame of bytes, this one {len(frames) - 1} frames")
    header = unpack(frames[1].buffer)
    check_request(header)
    payload = (
        np.frombuffer(frames[2].buffer, dtype=np.uint8) if len(frames) == 3 and len(frames[2].buffer) else np.empty(0, np.uint8)
    )
    return header, payload
