"""What this rank holds of every parameter: whole tensors, or FSDP2's DTensors, as shards of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncrl.errors import PlanMismatch
from asyncrl.weight_sync.plan import Shard, TensorSpec

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class LocalShard:
    """A parameter and the shard of it that this rank sends."""

    parameter: torch.Tensor
    shard: Shard

    def local(self) -> torch.Tensor:
        """The live local tensor, shaped as the shard."""
        held = self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter
        return held.detach()  # last: detaching a DTensor costs as much as copying a small one ten times


def local_shards(named_parameters: Iterable[tuple[str, torch.Tensor]], *, rank: int, wire_dtype: str | None) -> list[LocalShard]:
    """Every parameter once, in the order given; a tied one under its first name.

    `wire_dtype` (``bfloat16`` …) is what floating-point parameters are cast to, None leaves each its own. A tensor that all
    ranks hold whole is sent by rank 0; of replicas along a mesh dimension the first sends.
    """
    seen: set[int] = set()
    shards = []
    for name, parameter in named_parameters:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        dtype = (
            wire_dtype
            if wire_dtype is not None and parameter.is_floating_point()
            else str(parameter.dtype).removeprefix("torch.")
        )
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        spec = TensorSpec(name, tuple(parameter.shape), dtype)
        shards.append(LocalShard(parameter, _shard_of(spec, parameter, rank)))
    return shards


def _shard_of(spec: TensorSpec, parameter: torch.Tensor, rank: int) -> Shard:
    nothing = Shard(spec, (0,) * len(spec.shape), (0,) * max(1, len(spec.shape)), "elsewhere")
    if not isinstance(parameter, DTensor):
        return Shard(spec, (0,) * len(spec.shape), spec.shape) if rank == 0 else nothing
    placements, mesh = parameter.placements, parameter.device_mesh
    coordinate = mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        if type(placement) not in (ShardPlacement, Replicate):
            raise PlanMismatch(f"{spec.name}: the placement {placement} cannot be published: use Shard or Replicate")
        if isinstance(placement, Replicate) and coordinate is not None and coordinate[dim] != 0:
            return nothing
    if coordinate is None:
        return nothing
    size, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return Shard(spec, tuple(offset), tuple(size), ",".join(str(placement) for placement in placements))
