"""A published version as whole tensors, put together from the ranks' staging slots and checked slice by slice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from asyncrl.weight_sync.channel import Order
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


def checkpoint_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors by the names that a saved checkpoint has, which is what servers load: transformers keeps the experts of a
    layer in one parameter, gate_up_proj[E, 2I, H] and down_proj[E, H, I], and saves each expert by itself. Views, no copies.
    """
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".experts.")
        if not layer or part not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
            named[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            prefix = f"{layer}.experts.{number}"
            if part == "down_proj":
                named[f"{prefix}.down_proj.weight"] = expert
            else:
                gate, up = expert.chunk(2)
                named |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
    return named


def groups(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[list[str]]:
    """Names in their order, in groups of at most `max_bytes`, or of one; each of one dtype, so that none lies askew in a
    flattened bucket."""
    packed: list[list[str]] = []
    size = 0
    for name, tensor in tensors.items():
        if packed and tensors[packed[-1][0]].dtype == tensor.dtype and size + tensor.nbytes <= max_bytes:
            packed[-1].append(name)
            size += tensor.nbytes
        else:
            packed.append([name])
            size = tensor.nbytes
    return packed
