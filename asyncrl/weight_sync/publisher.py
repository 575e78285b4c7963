"""A trainer rank's side of a version: copy the local shards into a staging slot, then say so.

    trainer thread    stage(): cast and copy local shards ──▶ slot ──┐ (returns: the optimizer goes on)
    announcer thread                                   checksums ◀───┘──▶ ParameterSync.staged

    thread     consumes              waits for                  is unblocked by
    trainer    -                     the announcement before    the announcer, by a deadline
    announcer  versions to announce  the queue; remote calls    stage(), ParameterSync

No rank gathers the model: each copies what `to_local()` holds. A slot is not written over before its last announcement is out.

ParameterSync may die and be started again at its address. Every call is then made again until sync.timeout_seconds have passed,
and one that does not know this rank (NotRegistered) is told everything first: plan, slots, and what each slot holds. What a slot
holds is noted before it is written (nothing whole) and after (a version and its checksums), on whichever thread does it.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import uvloop

from asyncrl.errors import AsyncrlError, DeadlineExceeded, NotRegistered, RemoteError, StreamClosed
from asyncrl.transport.rpc import RpcClient
from asyncrl.weight_sync.plan import plan_rank
from asyncrl.weight_sync.shards import LocalShard, local_shards
from asyncrl.weight_sync.slots import NUM_SLOTS, create_slot, remove_slot, slot_name
from asyncrl.weight_sync.wire import Checksums

log = logging.getLogger(__name__)
_TRY_SECONDS = 3.0  # a call that was lost with ParameterSync's process is made again after this
_POLL_SECONDS = 2.0  # and so long it may wait for a confirmation before it answers
_PAUSE_SECONDS = 0.1
_GOODBYE_SECONDS = 10.0


class ShmPublisher:
    """protocols.WeightPublisher for one rank, over shared memory on ParameterSync's host.

    named_parameters: the model's, by Hugging Face names; wire_dtype: what the servers hold (None: no cast); address:
    ParameterSync's rpc. Not thread-safe: one trainer thread calls it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        run_id: str,
        address: str,
        incarnation: int,
        bucket_bytes: int,
        timeout_seconds: float,
        rank: int = 0,
        world_size: int = 1,
        wire_dtype: str | None = None,
    ):
        self._rank, self._incarnation, self._timeout = rank, incarnation, timeout_seconds
        self._shards = local_shards(named_parameters, rank=rank, wire_dtype=wire_dtype)
        self.plan = plan_rank([s.shard for s in self._shards], rank=rank, world_size=world_size, bucket_bytes=bucket_bytes)
        self._names = [slot_name(run_id, rank, slot) for slot in range(NUM_SLOTS)]
        self._slots: list[_Slot] = []
        self._contents: list[_Content | None] = [None] * NUM_SLOTS  # each entry is replaced as a whole
        self._address = address
        self._announcer: _Announcer | None = None
        self._underway: Future[None] | None = None
        self._latest: Mapping[str, float] = {}
        self._copier: _Copier = _copier_for(self._shards)

    def register(self) -> None:
        """Make the slots, tell ParameterSync of them and of this rank's plan. Raises PlanMismatch's RemoteError when the ranks'
        plans do not fit together."""
        assert self._announcer is None, "a publisher registers once"
        self._slots = [
            _Slot(create_slot(name, self.plan.slot_bytes), self._shards, self.plan.shard_offsets) for name in self._names
        ]
        for slot in self._slots:
            self._copier.prepare(slot)
        self._announcer = _Announcer(self._address)
        self._do(self._register(), "register")

    def reannounce(self) -> None:
        """Register again, with what the slots hold. From any thread."""
        announcer = self._announcer
        if announcer is not None:
            work = announcer.submit(self._register())
            _result(work, self._timeout + _GOODBYE_SECONDS, "register")

    def acquire(self, version: int) -> int:
        """Rank 0: the slot for `version`."""
        return int(self._do(self._acquire(version), "acquire_slot"))

    def stage(self, version: int, slot: int) -> float:
        """Copy this rank's shards into `slot`; checksums and the announcement follow on the announcer's thread."""
        assert self._announcer is not None, "register first"
        began = time.monotonic()
        self._finish_underway()
        self._contents[slot] = _Content(version)
        finished = self._copier.copy(self._shards, self._slots[slot])
        self._underway = self._announcer.submit(self._announce(version, slot, finished))
        return time.monotonic() - began

    def latest(self) -> Mapping[str, float]:
        return self._latest

    def wait_confirmed(self, version: int, timeout: float) -> bool:
        self._finish_underway()
        return bool(self._do(self._confirmed(version, timeout), "wait_confirmed", timeout))

    def close(self) -> None:
        """Remove the slots; a version being announced is waited for, by a deadline."""
        if self._announcer is not None:
            try:
                self._finish_underway()
            except AsyncrlError as error:
                log.warning("the last version was not announced: %s", error)
            self._announcer.close()
            self._announcer = None
        self._slots = []
        for name in self._names:
            remove_slot(name)

    # On the announcer's thread

    async def _register(self) -> None:
        contents = [(slot, held.version, held.checksums) for slot, held in enumerate(self._contents) if held is not None]
        await self._call(
            "register",
            rank=self._rank,
            world_size=self.plan.world_size,
            incarnation=self._incarnation,
            plan=self.plan.to_wire(),
            slots=self._names,
            contents=contents,
        )

    async def _acquire(self, version: int) -> int:
        slot = int(await self._call("acquire_slot", incarnation=self._incarnation, version=version))
        self._contents[slot] = _Content(version)
        return slot

    async def _announce(self, version: int, slot: int, finished: Callable[[], None]) -> None:
        finished()
        checksums = self._checksums(slot)
        self._contents[slot] = _Content(version, checksums)
        self._latest = await self._call(
            "staged", rank=self._rank, incarnation=self._incarnation, version=version, slot=slot, checksums=checksums
        )

    async def _confirmed(self, version: int, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while True:
            patience = min(max(deadline - time.monotonic(), 0.0), _POLL_SECONDS)
            if await self._call("wait_confirmed", incarnation=self._incarnation, version=version, patience=patience):
                return True
            if time.monotonic() >= deadline:
                return False

    async def _call(self, method: str, **params: Any) -> Any:
        """ParameterSync's answer, by sync.timeout_seconds, whichever of its processes gives it."""
        assert self._announcer is not None, "register first"
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return await self._announcer.client.call(method, timeout=max(0.0, min(left, _TRY_SECONDS)), **params)
            except DeadlineExceeded:
                if left <= _TRY_SECONDS:
                    raise DeadlineExceeded(
                        f"{method} at {self._address} was not answered within {self._timeout:g} s (sync.timeout_seconds): see "
                        "whether parameter_sync lives"
                    ) from None
            except RemoteError as error:
                if error.kind != NotRegistered.__name__ or left <= 0:
                    raise
                await self._register()
                await asyncio.sleep(_PAUSE_SECONDS)

    def _checksums(self, slot: int) -> Checksums:
        data = memoryview(self._slots[slot].memory)
        slices = self.plan.slices
        crcs = (zlib.crc32(data[s.slot_offset : s.slot_offset + s.num_bytes]) for s in slices)
        return np.fromiter(crcs, dtype=np.uint32, count=len(slices))

    # On the trainer's thread

    def _finish_underway(self) -> None:
        if self._underway is not None:
            underway, self._underway = self._underway, None
            _result(underway, self._timeout + _GOODBYE_SECONDS, "the announcement of the version before")

    def _do(self, work: Coroutine[Any, Any, Any], what: str, longer: float = 0.0) -> Any:
        assert self._announcer is not None, "register first"
        return _result(self._announcer.submit(work), 2 * self._timeout + longer + _GOODBYE_SECONDS, what)


@dataclass(frozen=True)
class _Content:
    """What a slot holds: all of `version`, or, without checksums, a version being written."""

    version: int
    checksums: Checksums | None = None


class _Slot:
    """A slot's memory, and for each shard a tensor of the wire's dtype over its place in it (None where there is no shard)."""

    def __init__(self, memory: mmap.mmap, shards: list[LocalShard], offsets: tuple[int | None, ...]):
        self.memory = memory
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.whole = whole
        self.places: list[torch.Tensor | None] = []
        for local, offset in zip(shards, offsets, strict=True):
            if offset is None:
                self.places.append(None)
                continue
            data = whole[offset : offset + local.shard.num_bytes]
            self.places.append(data.view(getattr(torch, local.shard.tensor.dtype)).view(local.shard.size))


class _Copier:
    """Copies shards from host memory; `copy` has read everything when it returns."""

    def prepare(self, slot: _Slot) -> None:
        """Called once for every slot."""

    @torch.no_grad()
    def copy(self, shards: list[LocalShard], slot: _Slot) -> Callable[[], None]:
        """Start the copy; the returned function blocks until the slot holds it."""
        held = [(place, local.local()) for local, place in zip(shards, slot.places, strict=True) if place is not None]
        if held:
            places, sources = zip(*held, strict=True)
            torch._foreach_copy_(places, sources)
        return lambda: None


class _CudaCopier(_Copier):
    """Copies from a GPU on a side stream into page-locked slots, so that `copy` returns at once; the current stream is made to
    wait for the reads, so that the optimizer's next kernels find the parameters free. Runs on machines with CUDA only."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def prepare(self, slot: _Slot) -> None:
        status = torch.cuda.cudart().cudaHostRegister(slot.whole.data_ptr(), slot.whole.numel(), 0)
        if int(status) != 0:
            log.warning("the staging slot could not be page-locked (cudaHostRegister: %s): copies will be slower", status)

    @torch.no_grad()
    def copy(self, shards: list[LocalShard], slot: _Slot) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for local, place in zip(shards, slot.places, strict=True):
                if place is not None:
                    source = local.local()
                    source.record_stream(self._stream)
                    place.copy_(source.to(place.dtype), non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        torch.cuda.current_stream().wait_event(done)
        return done.synchronize


def _copier_for(shards: list[LocalShard]) -> _Copier:
    device = shards[0].local().device if shards else torch.device("cpu")
    return _CudaCopier(device) if device.type == "cuda" else _Copier()


class _Announcer:
    """A thread with an event loop and ParameterSync's client."""

    def __init__(self, address: str):
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._ends = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="weights-announce", daemon=True)
        self.client = RpcClient(address)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Raises StreamClosed after `close`."""
        with self._ends:
            if self._is_closed:
                work.close()
                raise StreamClosed("the publisher was closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Calls under way raise StreamClosed."""
        closed = self.submit(self.client.close())
        with self._ends:
            self._is_closed = True
        _result(closed, _GOODBYE_SECONDS, "closing")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GOODBYE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


def _result(future: Future[Any], timeout: float, what: str) -> Any:
    try:
        return future.result(timeout)
    except TimeoutError:
        future.cancel()
        raise DeadlineExceeded(f"{what} did not end within {timeout:g} s: see parameter_sync's log") from None
