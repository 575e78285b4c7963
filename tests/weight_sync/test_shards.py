"""What a rank holds of a model that is not sharded."""

from __future__ import annotations

import torch

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
