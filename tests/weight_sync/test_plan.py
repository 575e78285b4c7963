"""The plan of a version: every byte of every tensor once, whatever the ranks and the bucket."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import PlanMismatch
from asyncrl.weight_sync.plan import (
    Plan,
    RankPlan,
    Shard,
    TensorSpec,
    bucket_bytes,
    buckets,
    check_cover,
    cut,
    flat_start,
    merge,
    plan_rank,
)

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


def sharded(spec: TensorSpec, rank: int, world_size: int, dim: int = 0) -> Shard:
    """The shard that FSDP2 would give `rank`: ceil(length / world_size) rows each, the last ones fewer or none."""
    if not spec.shape:
        return Shard(spec, (), ()) if rank == 0 else Shard(spec, (), (0,), "elsewhere")
    length = spec.shape[dim]
    rows = -(-length // world_size)
    start = min(rank * rows, length)
    offset = tuple(start if axis == dim else 0 for axis in range(len(spec.shape)))
    size = tuple(min(rows, length - start) if axis == dim else whole for axis, whole in enumerate(spec.shape))
    return Shard(spec, offset, size, f"Shard(dim={dim})")


def plans(specs: list[TensorSpec], world_size: int, limit: int, dims: list[int]) -> list[RankPlan]:
    return [
        plan_rank(
            [sharded(spec, rank, world_size, dim) for spec, dim in zip(specs, dims, strict=True)],
            rank=rank,
            world_size=world_size,
            bucket_bytes=limit,
        )
        for rank in range(world_size)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=5), st.integers(1, 4), st.integers(4, 200), st.data())
def test_slices_of_all_ranks_rebuild_every_tensor(tensor_shapes, world_size, limit, data):
    specs = [TensorSpec(f"t{i}", shape, "int32") for i, shape in enumerate(tensor_shapes)]
    dims = [data.draw(st.integers(0, max(0, len(spec.shape) - 1))) for spec in specs]
    parts = [RankPlan.from_wire(part.to_wire()) for part in plans(specs, world_size, limit, dims)]
    plan = merge(parts)
    wholes = [np.arange(1, math.prod(spec.shape) + 1, dtype=np.int32).reshape(spec.shape) for spec in specs]
    rebuilt = [np.zeros_like(whole) for whole in wholes]
    slots = [np.zeros(part.slot_bytes, np.uint8) for part in parts]
    for rank, part in enumerate(parts):
        for index, spec in enumerate(specs):
            shard = sharded(spec, rank, world_size, dims[index])
            if (at := part.shard_offsets[index]) is not None:
                box = tuple(slice(o, o + s) for o, s in zip(shard.offset, shard.size, strict=True))
                local = np.ascontiguousarray(wholes[index][box]).reshape(-1).view(np.uint8)
                slots[rank][at : at + len(local)] = local
    for piece in plan.slices:
        box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))
        raw = slots[piece.rank][piece.slot_offset : piece.slot_offset + piece.num_bytes]
        rebuilt[piece.tensor][box] = raw.copy().view(np.int32).reshape(piece.size)
    for whole, copy in zip(wholes, rebuilt, strict=True):
        assert np.array_equal(whole, copy)


@settings(max_examples=60, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=6), st.integers(1, 3), st.integers(64, 400))
def test_buckets_hold_every_slice_once_and_no_more_than_a_bucket(tensor_shapes, world_size, limit):
    specs = [TensorSpec(f"t{i}", shape, "float32") for i, shape in enumerate(tensor_shapes)]
    plan = merge(plans(specs, world_size, limit, [0] * len(specs)))
    packed = buckets(plan, limit)
    assert [i for bucket in packed for i in range(bucket.first, bucket.first + bucket.count)] == list(range(len(plan.slices)))
    for bucket in packed:
        held = plan.slices[bucket.first : bucket.first + bucket.count]
        assert bucket.num_bytes <= limit
        assert {piece.rank for piece in held} == {bucket.rank}
        assert held[0].slot_offset == bucket.slot_offset
        assert held[-1].slot_offset + held[-1].num_bytes == bucket.slot_offset + bucket.num_bytes


def test_small_tensors_share_a_bucket_and_a_large_one_is_cut():
    specs = [TensorSpec("a", (4,), "float32"), TensorSpec("b", (4,), "float32"), TensorSpec("large", (100, 10), "bfloat16")]
    plan = merge(plans(specs, 1, 512, [0, 0, 0]))
    packed = buckets(plan, 512)
    assert packed[0].count >= 2
    assert sum(piece.tensor == 2 for piece in plan.slices) == math.ceil(100 / (512 // 20))
    assert all(piece.num_bytes <= 512 for piece in plan.slices)


def test_a_row_larger_than_a_bucket_is_cut_within_the_row():
    pieces = list(cut((0, 0), (2, 10), max_elements=4))
    assert pieces[:3] == [((0, 0), (1, 4)), ((0, 4), (1, 4)), ((0, 8), (1, 2))]


def test_empty_shards_make_no_slice():
    parts = plans([TensorSpec("w", (3, 2), "float32")], 4, 64, [0])
    assert [len(part.slices) for part in parts] == [1, 1, 1, 0]
    assert parts[3].slot_bytes == 0
    assert merge(parts).num_bytes == 24


def test_the_id_names_the_content():
    specs = [TensorSpec("w", (3, 2), "float32")]
    plan = merge(plans(specs, 2, 64, [0]))
    assert Plan.from_wire(plan.to_wire()) == plan
    assert merge(plans(specs, 1, 64, [0])).id != plan.id


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([((0, 0), (2, 3))], "hold 6 elements, the tensor has 12"),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "element 3 is in two slices"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 1))], "overlap"),
        ([((2, 0), (4, 3))], "leaves the shape"),
    ],
)
def test_a_cover_with_a_gap_or_an_overlap_is_refused_by_name(boxes, says):
    with pytest.raises(PlanMismatch, match=f"^model.w: .*{says}"):
        check_cover(TensorSpec("model.w", (4, 3), "float32"), boxes)


def test_ranks_that_hold_different_models_are_refused():
    one = plan_rank([sharded(TensorSpec("w", (4,), "float32"), 0, 2)], rank=0, world_size=2, bucket_bytes=64)
    other = plan_rank([sharded(TensorSpec("w", (4,), "bfloat16"), 1, 2)], rank=1, world_size=2, bucket_bytes=64)
    with pytest.raises(PlanMismatch, match="ranks 0 and 1 must hold the same tensors"):
        merge([one, other])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.data())
def test_flat_start_is_where_a_run_begins(shape, data):
    offset = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    size = tuple(data.draw(st.integers(1, length - at)) for length, at in zip(shape, offset, strict=True))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    held = numbers[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].reshape(-1)
    is_run = bool((np.diff(held) == 1).all())
    assert flat_start(shape, offset, size) == (held[0] if is_run else None)


def test_a_throttle_makes_buckets_small():
    assert bucket_bytes(16, None) == 16_000_000
    assert bucket_bytes(16, 33) == 660_000
    assert bucket_bytes(16, 0.001) == 65_536
