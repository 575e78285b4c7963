"""A published version as whole tensors, put together from the ranks' staging slots and checked slice by slice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.weight_sync.channel import Order
from asyncrl.weight_sync.plan import TensorSpec
from asyncrl.weight_sync.slots import SlotMaps
from asyncrl.weight_sync.staging import Pace, Staging


def whole_tensors(order: Order, maps: SlotMaps, into: dict[str, torch.Tensor]) -> list[int]:
    """Fill `into` (tensors by Hugging Face names, made here where they are not there yet) with the order's version. Returns the
    slices that lay wrong in their slots. Blocking: bytes are copied at the order's pace."""
    for name in into.keys() - {spec.name for spec in order.plan.tensors}:
        del into[name]
    for spec in order.plan.tensors:
        dtype, known = getattr(torch, spec.dtype), into.get(spec.name)
        if known is None or (tuple(known.shape), known.dtype) != (spec.shape, dtype):
            into[spec.name] = torch.empty(spec.shape, dtype=dtype)
    staging = Staging(into)
    staging.begin(order.plan, order.version)
    slots = [np.frombuffer(maps.open(name), dtype=np.uint8) for name in order.slots]
    pace, wrong = Pace(order.bytes_per_second), []
    for index, piece in enumerate(order.plan.slices):
        data = slots[piece.rank][piece.slot_offset : piece.slot_offset + piece.num_bytes]
        if not staging.write(index, data, int(order.checksums[index]), pace):
            wrong.append(index)
    return wrong


def groups(tensors: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Tensors in their order, in groups of at most `max_bytes`, or of one; each of one dtype, so that none lies askew in a
    flattened bucket."""
    packed: list[list[TensorSpec]] = []
    size = 0
    for tensor in tensors:
        num_bytes = _num_bytes(tensor)
        if packed and packed[-1][0].dtype == tensor.dtype and size + num_bytes <= max_bytes:
            packed[-1].append(tensor)
            size += num_bytes
        else:
            packed.append([tensor])
            size = num_bytes
    return packed


def _num_bytes(tensor: TensorSpec) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * tensor.item_bytes
