"""A server's staging tensors: what has arrived of a version, checked piece by piece, and the checksums of what is live.

Used by one thread at a time. Nothing here touches the live parameters except to read them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.errors import PlanMismatch
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.plan import Plan, Slice, TensorSpec, flat_start
from asyncrl.weight_sync.wire import Checksums

CHUNK_BYTES = 1 << 20
Bytes = npt.NDArray[np.uint8]


class Superseded(Exception):
    """The version being read is not wanted any more."""


class Pace:
    """Spreads bytes evenly: after each piece, sleep until the rate allows the next. None is full speed.

    `go_on` is asked between pieces; Superseded is raised when it says no.
    """

    def __init__(self, bytes_per_second: float | None = None, go_on: Callable[[], bool] = lambda: True):
        self._rate, self._go_on = bytes_per_second, go_on
        self._began, self._spent = time.monotonic(), 0
        self.chunk_bytes = (
            CHUNK_BYTES if bytes_per_second is None else int(min(CHUNK_BYTES, max(65_536, bytes_per_second * 0.005)))
        )

    def spend(self, num_bytes: int) -> None:
        if not self._go_on():
            raise Superseded
        self._spent += num_bytes
        if self._rate is None:
            return
        due = self._began + self._spent / self._rate
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
            if not self._go_on():
                raise Superseded


class SliceBytes:
    """Where the slices of a plan lie in memory, in tensors of its names.

    Commits exchange the memory of staged and live tensors, so that the same two memories are met in turn: of each slice the last
    two arrays are kept. An array keeps its memory alive, and so an address that is known is still that memory's.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.names = [plan.tensors[piece.tensor].name for piece in plan.slices]
        self._starts = [_byte_start(plan.tensors[piece.tensor], piece) for piece in plan.slices]
        self._known: list[dict[int, Bytes]] = [{} for _ in plan.slices]

    def of(self, index: int, tensor: torch.Tensor) -> Bytes | None:
        """Slice `index` in its tensor, or None where it is not one run of CPU memory."""
        start = self._starts[index]
        if start is None or not tensor.is_cpu or not tensor.is_contiguous():
            return None
        known, address = self._known[index], tensor.data_ptr()
        if address not in known:
            if len(known) == 2:
                known.clear()
            whole: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
            known[address] = whole[start : start + self.plan.slices[index].num_bytes]
        return known[address]


class Staging:
    """Tensors that are filled slice by slice; complete when every slice arrived with the checksum it was sent with."""

    def __init__(self, spare: Mapping[str, torch.Tensor]):
        self.tensors = dict(spare)
        self.version: PolicyVersion | None = None
        self.slices: SliceBytes | None = None
        self._missing: set[int] = set()

    @property
    def complete(self) -> bool:
        return self.version is not None and not self._missing

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def begin(self, plan: Plan, version: PolicyVersion) -> None:
        """Expect every slice of `plan` anew."""
        if self.slices is None or self.slices.plan is not plan:
            self.slices = SliceBytes(plan)
        self.version, self._missing = version, set(range(len(plan.slices)))

    def forget(self) -> None:
        """Nothing is expected, nothing can be committed."""
        self.version, self._missing = None, set()

    def write(self, index: int, data: Bytes, checksum: int, pace: Pace) -> bool:
        """Copy slice `index` in; False when what arrived has another checksum (then the slice stays missing)."""
        assert self.slices is not None
        piece, whole = self.slices.plan.slices[index], self.tensors[self.slices.names[index]]
        self._missing.add(index)
        if len(data) != piece.num_bytes:
            return False
        target = self.slices.of(index, whole)
        crc = 0
        if target is None:  # through a tensor of its own
            pace.spend(piece.num_bytes)
            crc = zlib.crc32(data.data)
            _box(whole, piece).copy_(torch.from_numpy(data.copy()).view(whole.dtype).view(piece.size))
        else:
            for start in range(0, piece.num_bytes, pace.chunk_bytes):
                end = min(start + pace.chunk_bytes, piece.num_bytes)
                np.copyto(target[start:end], data[start:end])
                crc = zlib.crc32(target[start:end].data, crc)
                pace.spend(end - start)
        if crc != checksum:
            return False
        self._missing.discard(index)
        return True


def check_plan(plan: Plan, live: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanMismatch, naming the parameter, unless plan and live parameters have the same names, shapes and dtypes."""
    for spec in plan.tensors:
        tensor = live.get(spec.name)
        if tensor is None:
            raise PlanMismatch(f"{spec.name}: in the plan, but the server has no such parameter: serve the model that is trained")
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (spec.shape, spec.dtype):
            raise PlanMismatch(
                f"{spec.name}: the plan has {spec.shape} {spec.dtype}, the server {found[0]} {found[1]}: use one model.dtype"
            )
    absent = sorted(set(live) - {spec.name for spec in plan.tensors})
    if absent:
        raise PlanMismatch(f"{absent[0]}: the server has it, the plan does not ({len(absent)} such parameters)")


def live_checksums(plan: Plan, live: Mapping[str, torch.Tensor], pace: Pace, slices: SliceBytes | None = None) -> Checksums:
    """CRC-32 of every slice of the live parameters, in plan order. slices: the plan's, where they are known already."""
    slices = slices or SliceBytes(plan)
    checksums = np.empty(len(plan.slices), dtype=np.uint32)
    for index, piece in enumerate(plan.slices):
        tensor = live[slices.names[index]]
        data = slices.of(index, tensor)
        if data is None:
            data = _box(tensor.detach(), piece).contiguous().cpu().view(-1).view(torch.uint8).numpy()
        crc = 0
        for start in range(0, piece.num_bytes, CHUNK_BYTES):
            crc = zlib.crc32(data[start : start + CHUNK_BYTES].data, crc)
            pace.spend(min(CHUNK_BYTES, piece.num_bytes - start))
        checksums[index] = crc
    return checksums


def _byte_start(tensor: TensorSpec, piece: Slice) -> int | None:
    """Where the slice begins in the tensor's memory, if it is one run of it."""
    start = flat_start(tensor.shape, piece.offset, piece.size)
    return None if start is None else start * tensor.item_bytes


def _box(tensor: torch.Tensor, piece: Slice) -> torch.Tensor:
    for axis, (offset, size) in enumerate(zip(piece.offset, piece.size, strict=True)):
        tensor = tensor.narrow(axis, offset, size)
    return tensor
