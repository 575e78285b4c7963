"""One FSDP2 rank as a program: rank, rendezvous file, folder, run id, then routes (ParameterSync's address, wire dtype).

Publishes three versions by every route, and leaves `<dtype>-<version>.pt`, the cast full state dict by name, in the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.weight_sync.publisher import ShmPublisher

WORLD_SIZE = 2


class OddModel(nn.Module):
    """Tied ends, rows that two ranks cannot share evenly, and a parameter of one row, of which rank 1 holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 6)])
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight


def main(rank: int, rendezvous: str, folder: Path, run_id: str, routes: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    model = OddModel()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for route in routes:
        address, wire_dtype = route.split(",")
        publish(model, rank, address, folder, run_id, wire_dtype)
    dist.destroy_process_group()


def publish(model: OddModel, rank: int, address: str, folder: Path, run_id: str, wire_dtype: str) -> None:
    publisher = ShmPublisher(
        model.named_parameters(), run_id=run_id, address=address, incarnation=1, bucket_bytes=64, timeout_seconds=20,
        rank=rank, world_size=WORLD_SIZE, wire_dtype=wire_dtype,
    )  # fmt: skip
    publisher.register()
    dist.barrier()
    for version in range(3):
        slot = torch.tensor([publisher.acquire(version) if rank == 0 else -1])
        dist.broadcast(slot, 0)
        publisher.stage(version, int(slot))
        full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        if rank == 0:
            cast = {n: p.detach().to(getattr(torch, wire_dtype)) for n, p in full.items()}
            torch.save(cast, folder / f"{wire_dtype}-{version}.pt")
        assert publisher.wait_confirmed(version, 20)
        dist.barrier()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.37)
    publisher.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
