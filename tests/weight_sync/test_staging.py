"""Staging tensors: complete only when every slice arrived with its checksum."""

from __future__ import annotations

import time
import zlib

import numpy as np
import pytest
import torch

from asyncrl.errors import PlanMismatch
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.plan import Plan, Shard, TensorSpec, merge, plan_rank
from asyncrl.weight_sync.staging import Pace, Staging, Superseded, check_plan, live_checksums

VERSION = PolicyVersion(1, 1)


def plan_of(tensors: dict[str, torch.Tensor], limit: int = 64) -> Plan:
    specs = [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    shards = [Shard(spec, (0,) * len(spec.shape), spec.shape) for spec in specs]
    return merge([plan_rank(shards, rank=0, world_size=1, bucket_bytes=limit)])


def slices_of(plan: Plan, tensors: dict[str, torch.Tensor]) -> list[np.ndarray]:
    values = []
    for piece in plan.slices:
        box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))
        tensor = tensors[plan.tensors[piece.tensor].name][box].contiguous().view(-1)
        values.append(tensor.view(torch.uint8).numpy().copy())
    return values


def spare_like(tensors):
    return {name: torch.empty_like(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_written_is_what_was_sent(dtype, transposed):
    sent = {"w": torch.randn(10, 12).to(dtype), "b": torch.randn(3).to(dtype), "s": torch.randn(()).to(dtype)}
    live = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    if transposed:  # a parameter whose memory is not one row-major run
        live["w"] = torch.zeros(12, 10, dtype=dtype).t()
    plan = plan_of(sent)
    staging = Staging(live)
    staging.begin(plan, VERSION)
    for index, data in enumerate(slices_of(plan, sent)):
        assert not staging.complete
        assert staging.write(index, data, zlib.crc32(data), Pace())
    assert staging.complete
    assert all(torch.equal(staging.tensors[name], tensor) for name, tensor in sent.items())
    assert list(live_checksums(plan, staging.tensors, Pace())) == [zlib.crc32(data) for data in slices_of(plan, sent)]


def test_a_flipped_byte_is_refused_and_the_slice_can_be_sent_again():
    sent = {"w": torch.randn(10, 12)}
    plan = plan_of(sent)
    staging = Staging(spare_like(sent))
    staging.begin(plan, VERSION)
    pieces = slices_of(plan, sent)
    for index, data in enumerate(pieces):
        damaged = data.copy()
        damaged[5] ^= 1 if index == 2 else 0
        assert staging.write(index, damaged, zlib.crc32(data), Pace()) is (index != 2)
    assert not staging.complete
    assert staging.write(2, pieces[2], zlib.crc32(pieces[2]), Pace())
    assert staging.complete


def test_a_slice_of_the_wrong_length_is_refused():
    sent = {"w": torch.randn(10)}
    plan = plan_of(sent)
    staging = Staging(spare_like(sent))
    staging.begin(plan, VERSION)
    assert not staging.write(0, np.zeros(3, np.uint8), 0, Pace())


def test_beginning_anew_expects_everything_again():
    sent = {"w": torch.randn(4)}
    plan = plan_of(sent)
    staging = Staging(spare_like(sent))
    staging.begin(plan, VERSION)
    data = slices_of(plan, sent)[0]
    staging.write(0, data, zlib.crc32(data), Pace())
    staging.begin(plan, PolicyVersion(1, 2))
    assert not staging.complete


def test_a_throttled_write_takes_as_long_as_the_rate_says_and_can_be_called_off():
    sent = {"w": torch.randn(100_000)}
    plan = plan_of(sent, limit=1_000_000)
    staging = Staging(spare_like(sent))
    staging.begin(plan, VERSION)
    data = slices_of(plan, sent)[0]
    began = time.monotonic()
    assert staging.write(0, data, zlib.crc32(data), Pace(4_000_000))
    assert time.monotonic() - began >= 0.09
    asked = []
    with pytest.raises(Superseded):
        staging.write(0, data, zlib.crc32(data), Pace(1_000, lambda: asked.append(1) or len(asked) < 3))
    assert not staging.complete


@pytest.mark.parametrize(
    ("live", "says"),
    [
        ({"w": torch.zeros(4, 2)}, "b: in the plan, but the server has no such parameter"),
        ({"w": torch.zeros(4, 3), "b": torch.zeros(2)}, "w: the plan has"),
        ({"w": torch.zeros(4, 2, dtype=torch.bfloat16), "b": torch.zeros(2)}, "w: .* bfloat16: use one model.dtype"),
        ({"w": torch.zeros(4, 2), "b": torch.zeros(2), "c": torch.zeros(1)}, "c: the server has it, the plan does not"),
    ],
)
def test_a_plan_that_does_not_fit_the_server_names_the_parameter(live, says):
    with pytest.raises(PlanMismatch, match=says):
        check_plan(plan_of({"w": torch.zeros(4, 2), "b": torch.zeros(2)}), live)
