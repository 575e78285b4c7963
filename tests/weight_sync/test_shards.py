"""What a rank holds of every parameter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncrl.errors import PlanMismatch
from asyncrl.weight_sync.plan import merge, plan_rank
from asyncrl.weight_sync.shards import local_shards


def test_a_tied_parameter_is_sent_once_under_its_first_name():
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    shards = local_shards([("embed.weight", weight), ("lm_head.weight", weight)], rank=0, wire_dtype=None)
    assert [local.shard.tensor.name for local in shards] == ["embed.weight"]


def test_floats_are_cast_and_integers_are_not():
    named = [("w", torch.zeros(2)), ("steps", torch.zeros(2, dtype=torch.int64))]
    shards = local_shards(named, rank=0, wire_dtype="bfloat16")
    assert [local.shard.tensor.dtype for local in shards] == ["bfloat16", "int64"]


def test_wrappers_leave_the_name():
    named = [("_orig_mod.layers.0._checkpoint_wrapped_module.q.weight", torch.zeros(2))]
    assert local_shards(named, rank=0, wire_dtype=None)[0].shard.tensor.name == "layers.0.q.weight"


def test_whole_tensors_are_sent_by_rank_0_alone():
    named = [("w", torch.zeros(2)), ("scale", torch.zeros(()))]
    assert [local.shard.num_bytes for local in local_shards(named, rank=0, wire_dtype=None)] == [8, 4]
    assert [local.shard.num_bytes for local in local_shards(named, rank=1, wire_dtype=None)] == [0, 0]


@pytest.fixture
def as_rank():
    """Be one rank of four, without the other three: shapes and offsets need no communication."""
    worlds = []

    def enter(rank: int):
        if worlds:
            dist.destroy_process_group()
        worlds.append(rank)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    yield enter
    if worlds:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "senders"),
    [
        ((Replicate(), ShardPlacement(0)), {0, 1}),
        ((ShardPlacement(0), Replicate()), {0, 2}),
        ((ShardPlacement(0), ShardPlacement(1)), {0, 1, 2, 3}),
    ],
)
def test_replicas_send_once_and_shards_along_two_dimensions_cover_the_tensor(as_rank, placements, senders):
    whole = torch.arange(35.0).reshape(5, 7)
    parts = []
    for rank in range(4):
        mesh = as_rank(rank)
        size, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
        local = whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
        parameter = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        (held,) = local_shards([("w", parameter)], rank=rank, wire_dtype=None)
        assert torch.equal(held.local(), local)
        parts.append(plan_rank([held.shard], rank=rank, world_size=4, bucket_bytes=16))
    assert {piece.rank for piece in merge(parts).slices} == senders


def test_a_placement_that_holds_partial_sums_is_refused(as_rank):
    mesh = as_rank(0)
    parameter = DTensor.from_local(torch.zeros(4), mesh, (Partial(), Replicate()), run_check=False)
    with pytest.raises(PlanMismatch, match=r"w: the placement .* cannot be published"):
        local_shards([("w", parameter)], rank=0, wire_dtype=None)
