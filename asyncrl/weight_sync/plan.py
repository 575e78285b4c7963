"""The plan of a version: which bytes of which slot are which part of which tensor. Plain values only.

    tensor ──(one box a rank: its shard)──▶ boxes ──(cut to at most a bucket)──▶ slices ──(packed, in slot order)──▶ buckets

Every slice is a box of one tensor and lies contiguously, row-major, in its rank's staging slot. The slices of all ranks cover
each tensor exactly once (`merge` checks it). A slice is the unit that a checksum covers, a bucket the unit that travels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import PlanMismatch

ALIGNMENT_BYTES = 64
_HUGE = 2**62  # no element and no byte of a plan is counted that far
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size), both in elements along each dimension."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by its Hugging Face name, with its global shape and its dtype on the wire (after the cast)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Shard:
    """What one rank holds of one tensor: the box [offset, offset + size). `placement` is for people: ``Shard(dim=0)``."""

    tensor: TensorSpec
    offset: tuple[int, ...]
    size: tuple[int, ...]
    placement: str = "whole"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.tensor.item_bytes


@dataclass(frozen=True)
class Slice:
    """A box of tensor number `tensor`, at byte `slot_offset` of the slot of `rank`."""

    tensor: int
    rank: int
    offset: tuple[int, ...]
    size: tuple[int, ...]
    slot_offset: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Slices [first, first + count) of the plan, which lie in `rank`'s slot at [slot_offset, slot_offset + num_bytes)."""

    rank: int
    first: int
    count: int
    slot_offset: int
    num_bytes: int


@dataclass(frozen=True)
class RankPlan:
    """One rank's part. `tensors` lists every tensor of the model, the same on all ranks; `slices` only this rank's;
    `shard_offsets[i]` is where the shard of tensor i begins in the slot, None where this rank holds nothing of it."""

    rank: int
    world_size: int
    tensors: tuple[TensorSpec, ...]
    placements: tuple[str, ...]
    slices: tuple[Slice, ...]
    shard_offsets: tuple[int | None, ...]
    slot_bytes: int

    def to_wire(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors],
            "placements": list(self.placements),
            "slices": [_slice_to_wire(s) for s in self.slices],
            "shard_offsets": list(self.shard_offsets),
            "slot_bytes": self.slot_bytes,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RankPlan:
        """Raises PlanMismatch for what is no rank's part of a plan."""
        tensors = _tensors_from_wire(wire.get("tensors"))
        rank, world_size, slot_bytes = (wire.get(name) for name in ("rank", "world_size", "slot_bytes"))
        placements, offsets = wire.get("placements"), wire.get("shard_offsets")
        _check(_are_counts([rank, world_size, slot_bytes]), "rank, world_size and slot_bytes are counts", wire)
        _check(_is_list(placements, lambda text: type(text) is str), "placements are texts", placements)
        _check(_is_list(offsets, lambda at: at is None or _is_count(at)), "shard_offsets are counts or null", offsets)
        slices = _slices_from_wire(wire.get("slices"), tensors)
        _check(all(piece.rank == rank for piece in slices), "the slices are the rank's own", rank)
        return cls(rank, world_size, tensors, tuple(placements), slices, tuple(offsets), slot_bytes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Plan:
    """All ranks' slices: rank by rank, and in slot order within a rank. `id` names the content."""

    tensors: tuple[TensorSpec, ...]
    slices: tuple[Slice, ...]
    slot_bytes: tuple[int, ...]
    id: str

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.slices)

    def to_wire(self) -> dict[str, Any]:
        return _plan_to_wire(self.tensors, self.slices, self.slot_bytes)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Plan:
        """Raises PlanMismatch for what is no plan, and for one whose slices leave their slots or do not cover every tensor
        exactly once: a version that has all slices of a plan is whole."""
        tensors, found = _tensors_from_wire(wire.get("tensors")), wire.get("slot_bytes")
        _check(_are_counts(found), "slot_bytes are counts, one a rank", found)
        slices, slot_bytes = _slices_from_wire(wire.get("slices"), tensors), tuple(found or ())
        for piece in slices:
            inside = piece.rank < len(slot_bytes) and piece.slot_offset + piece.num_bytes <= slot_bytes[piece.rank]
            _check(inside, "every slice lies in its rank's slot", piece)
        _check_covers(tensors, slices)
        return cls(tensors, slices, slot_bytes, _plan_id(tensors, slices, slot_bytes))


def plan_rank(shards: Sequence[Shard], *, rank: int, world_size: int, bucket_bytes: int) -> RankPlan:
    """Lay this rank's shards out in a slot, each begun on a multiple of 64 bytes, and cut them to at most `bucket_bytes`.

    `shards` names every tensor of the model once, in the same order on every rank; a rank that holds nothing of a tensor has a
    shard with a 0 in its size, which takes no place and makes no slice.
    """
    end, slices, offsets = 0, [], list[int | None]()
    for index, shard in enumerate(shards):
        if math.prod(shard.size) == 0:
            offsets.append(None)
            continue
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        item = shard.tensor.item_bytes
        at = start
        for offset, size in cut(shard.offset, shard.size, max_elements=max(1, bucket_bytes // item)):
            num_bytes = math.prod(size) * item
            slices.append(Slice(index, rank, offset, size, at, num_bytes))
            at += num_bytes
        end = at
    tensors = tuple(shard.tensor for shard in shards)
    placements = tuple(shard.placement for shard in shards)
    return RankPlan(rank, world_size, tensors, placements, tuple(slices), tuple(offsets), end)


def merge(parts: Iterable[RankPlan]) -> Plan:
    """The plan of the whole version. Raises PlanMismatch, naming the parameter, when the ranks disagree on a tensor or their
    slices do not cover it exactly once."""
    parts = sorted(parts, key=lambda part: part.rank)
    world_size = parts[0].world_size
    assert [part.rank for part in parts] == list(range(world_size)), "one part from every rank"
    tensors = parts[0].tensors
    for part in parts[1:]:
        for ours, theirs in zip(tensors, part.tensors, strict=False):
            if ours != theirs:
                raise PlanMismatch(f"ranks 0 and {part.rank} must hold the same tensors, but one has {ours}, the other {theirs}")
        if len(part.tensors) != len(tensors):
            raise PlanMismatch(f"ranks 0 and {part.rank} must hold the same tensors: {len(tensors)} and {len(part.tensors)}")
    slices = tuple(piece for part in parts for piece in part.slices)
    _check_covers(tensors, slices)
    slot_bytes = tuple(part.slot_bytes for part in parts)
    return Plan(tensors, slices, slot_bytes, _plan_id(tensors, slices, slot_bytes))


def buckets(plan: Plan, bucket_bytes: int) -> list[Bucket]:
    """Pack neighbouring slices of a rank into buckets of at most `bucket_bytes`, alignment gaps between them included."""
    packed: list[Bucket] = []
    for index, piece in enumerate(plan.slices):
        last = packed[-1] if packed else None
        end = piece.slot_offset + piece.num_bytes
        if last is not None and last.rank == piece.rank and end - last.slot_offset <= bucket_bytes:
            packed[-1] = Bucket(last.rank, last.first, last.count + 1, last.slot_offset, end - last.slot_offset)
        else:
            packed.append(Bucket(piece.rank, index, 1, piece.slot_offset, piece.num_bytes))
    return packed


def single(plan: Plan, index: int) -> Bucket:
    """A bucket of one slice."""
    piece = plan.slices[index]
    return Bucket(piece.rank, index, 1, piece.slot_offset, piece.num_bytes)


def bucket_bytes(bucket_megabytes: float, max_megabytes_per_second: float | None) -> int:
    """Most bytes of a bucket: as configured, but under a throttle at most what 20 ms of it carry (at least 64 kB)."""
    most = bucket_megabytes * 1e6
    if max_megabytes_per_second is not None:
        most = min(most, max(65_536.0, max_megabytes_per_second * 1e6 * 0.02))
    return int(max(most, ALIGNMENT_BYTES))


def cut(offset: tuple[int, ...], size: tuple[int, ...], *, max_elements: int) -> Iterator[Box]:
    """Boxes of at most `max_elements` that together are the box, in its row-major order, so that the pieces lie one after the
    other where the box lies contiguously."""
    if math.prod(size) <= max_elements:
        yield offset, size
        return
    dim = next(axis for axis, length in enumerate(size) if length > 1)
    step = max(1, max_elements // math.prod(size[dim + 1 :]))
    for start in range(0, size[dim], step):
        piece_offset = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
        piece_size = (*size[:dim], min(step, size[dim] - start), *size[dim + 1 :])
        yield from cut(piece_offset, piece_size, max_elements=max_elements)


def flat_start(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> int | None:
    """Where the box begins in the flattened tensor if it is one run of it, else None."""
    first = next((axis for axis, length in enumerate(size) if length != 1), len(size))
    if any(size[axis] != shape[axis] for axis in range(first + 1, len(size))):
        return None
    start = 0
    for length, at in zip(shape, offset, strict=True):
        start = start * length + at
    return start


def _check_covers(tensors: Sequence[TensorSpec], slices: Iterable[Slice]) -> None:
    boxes: list[list[Box]] = [[] for _ in tensors]
    for piece in slices:
        boxes[piece.tensor].append((piece.offset, piece.size))
    for tensor, of_tensor in zip(tensors, boxes, strict=True):
        check_cover(tensor, of_tensor)


def check_cover(tensor: TensorSpec, boxes: Sequence[Box]) -> None:
    """Raise PlanMismatch unless the boxes lie inside the tensor, are disjoint, and fill it."""
    for offset, size in boxes:
        if any(at < 0 or at + length > whole for at, length, whole in zip(offset, size, tensor.shape, strict=True)):
            raise PlanMismatch(f"{tensor.name}: the slice at {offset} of size {size} leaves the shape {tensor.shape}")
    held, total = sum(math.prod(size) for _, size in boxes), math.prod(tensor.shape)
    if held != total:
        raise PlanMismatch(f"{tensor.name}: the slices of all ranks hold {held} elements, the tensor has {total}")
    runs = [(flat_start(tensor.shape, offset, size), math.prod(size)) for offset, size in boxes]
    if all(start is not None for start, _ in runs):
        ends = 0
        for start, length in sorted((start or 0, length) for start, length in runs):
            if start < ends:
                raise PlanMismatch(f"{tensor.name}: element {start} is in two slices")
            ends = start + length
        return
    for index, box in enumerate(boxes):
        for other in boxes[:index]:
            if _overlap(box, other):
                raise PlanMismatch(f"{tensor.name}: the slices at {box[0]} and {other[0]} overlap")


def _overlap(one: Box, other: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))


def _slice_to_wire(piece: Slice) -> list[Any]:
    return [piece.tensor, piece.rank, list(piece.offset), list(piece.size), piece.slot_offset, piece.num_bytes]


def _slices_from_wire(rows: Any, tensors: Sequence[TensorSpec]) -> tuple[Slice, ...]:
    """Raises PlanMismatch."""
    _check(_is_list(rows, lambda row: _is_list(row) and len(row) == 6), "slices are rows of six", rows)
    slices = []
    for tensor, rank, offset, size, slot_offset, num_bytes in rows:
        counts = _are_counts([tensor, rank, slot_offset, num_bytes]) and _are_counts(offset) and _are_counts(size)
        _check(counts and tensor < len(tensors), "a slice is a box of counts of one of the tensors", (tensor, offset, size))
        of = tensors[tensor]
        _check(len(offset) == len(size) == len(of.shape), "a slice has a tensor's dimensions", (of.name, offset, size))
        _check(num_bytes == math.prod(size) * of.item_bytes, "a slice has the bytes of its box", (of.name, size, num_bytes))
        slices.append(Slice(tensor, rank, tuple(offset), tuple(size), slot_offset, num_bytes))
    return tuple(slices)


def _tensors_from_wire(rows: Any) -> tuple[TensorSpec, ...]:
    """Raises PlanMismatch."""
    _check(_is_list(rows, lambda row: _is_list(row) and len(row) == 3), "tensors are rows of three", rows)
    for name, shape, dtype in rows:
        right = type(name) is str and _are_counts(shape) and type(dtype) is str and dtype in ITEM_BYTES
        _check(right, "a tensor is a name, a shape and a dtype", (name, shape, dtype))
    _check(len({name for name, _, _ in rows}) == len(rows), "every tensor has a name of its own", len(rows))
    return tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in rows)


def _check(holds: bool, rule: str, found: object) -> None:
    if not holds:
        raise PlanMismatch(f"not a plan: {rule}; found {found!r:.120}")


def _is_list(value: Any, is_right: Callable[[Any], bool] = lambda item: True) -> bool:
    return type(value) is list and all(map(is_right, value))


def _are_counts(value: Any) -> bool:
    return _is_list(value, _is_count)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _HUGE


def _plan_to_wire(tensors: Sequence[TensorSpec], slices: Sequence[Slice], slot_bytes: Sequence[int]) -> dict[str, Any]:
    return {
        "tensors": [[t.name, list(t.shape), t.dtype] for t in tensors],
        "slices": [_slice_to_wire(s) for s in slices],
        "slot_bytes": list(slot_bytes),
    }


def _plan_id(tensors: Sequence[TensorSpec], slices: Sequence[Slice], slot_bytes: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(_plan_to_wire(tensors, slices, slot_bytes)).encode()).hexdigest()[:16]
