"""A model over all ranks: one FSDP2 unit a block, rank 0's weights, AdamW on float32 master weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.config.schema import Config, TrainingConfig
from asyncrl.engines.fsdp.process_group import RankGroup


class InBlocks(nn.Module, ABC):
    """A model of transformer blocks."""

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The blocks, first to last: what FSDP shards one by one."""


Model = TypeVar("Model", bound=InBlocks)


def spread_over_ranks(model: Model, config: Config, group: RankGroup, device: torch.device) -> Model:
    """The same module, sharded over all ranks, with the weights and buffers that it has on rank 0."""
    full = dict(model.named_parameters()) if group.rank == 0 and group.world_size > 1 else {}
    mesh = init_device_mesh(device.type, (group.world_size,))
    precision = MixedPrecisionPolicy()
    if config.model.dtype == "bfloat16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=group.world_size > 1)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    _share_out(model, full, group)
    return model


@torch.no_grad()
def _share_out(model: nn.Module, full: dict[str, torch.Tensor], group: RankGroup) -> None:
    """One parameter at a time, so that no rank holds two wholes."""
    if group.world_size == 1:
        return
    for name, parameter in model.named_parameters():
        whole = full[name].to(parameter.device) if group.rank == 0 else torch.empty(parameter.shape, device=parameter.device)
        mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(mine.to_local())
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward one: give up the gathered weights, so that only the shards are left and no later
    pass sees weights from before an update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def adamw(parameters: Iterable[nn.Parameter], training: TrainingConfig, *, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
        fused=True,
    )


def clipped_norm(parameters: list[nn.Parameter], largest: float) -> float:
    """The gradient's norm over all ranks, before it was scaled down to `largest`."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
