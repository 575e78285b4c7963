"""A server's stand-in: named tensors, and a commit that exchanges them at once; and a staged version for it."""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncrl.protocols.weights import CommitReport, KvPolicy, PolicyVersion
from asyncrl.weight_sync.channel import Order
from asyncrl.weight_sync.plan import Shard, TensorSpec, merge, plan_rank
from asyncrl.weight_sync.shards import local_shards
from asyncrl.weight_sync.slots import create_slot, remove_slot, slot_name

FIRST = PolicyVersion(1, 1)
_numbers = itertools.count()


class StandInTarget:
    """protocols.WeightTarget over a dict of tensors. `gate` closed holds commits back, as a long decode step would;
    `spoil` makes a commit put something else live than what was staged."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self.commits: list[PolicyVersion] = []
        self.gate = threading.Event()
        self.gate.set()
        self.spoil, self.spoiled = False, 0

    def find(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        pass

    def spare(self) -> Mapping[str, torch.Tensor]:
        return {name: torch.empty_like(tensor) for name, tensor in self._live.items()}

    def live(self) -> Mapping[str, torch.Tensor]:
        return self._live

    def commit(self, staged: Mapping[str, torch.Tensor], version: PolicyVersion, kv_policy: KvPolicy) -> CommitReport:
        assert self.gate.wait(30)
        for name, tensor in staged.items():
            live = self._live[name]
            live.data, tensor.data = tensor.data, live.data
        self.spoiled += self.spoil
        if self.spoil:
            next(iter(self._live.values())).view(-1)[0] += 1
        self.commits.append(version)
        return CommitReport(pause_seconds=0.001)

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return all(torch.equal(self._live[name], tensor) for name, tensor in tensors.items())


def a_model(seed: int = 0, dtype: torch.dtype = torch.float32, rows: int = 50) -> dict[str, torch.Tensor]:
    """A few named tensors, one of them larger than the tests' buckets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (rows, 8), "layer.weight": (8, 8), "layer.bias": (8,), "norm.weight": (8,), "scale": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class StagedModel:
    """A model in one staging slot, and orders to bring it to a server."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], bucket_bytes: int = 600):
        shards = [local.shard for local in local_shards(tensors.items(), rank=0, wire_dtype=None)]
        part = plan_rank(shards, rank=0, world_size=1, bucket_bytes=bucket_bytes)
        self.plan, self.name = merge([part]), slot_name(f"test{os.getpid()}n{next(_numbers)}", 0, 0)
        self.bucket_bytes = bucket_bytes
        self.memory = create_slot(self.name, part.slot_bytes)
        for tensor, at in zip(tensors.values(), part.shard_offsets, strict=True):
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert at is not None
            self.memory[at : at + len(data)] = data
        slots = memoryview(self.memory)
        crcs = [zlib.crc32(slots[s.slot_offset : s.slot_offset + s.num_bytes]) for s in self.plan.slices]
        self.checksums = np.array(crcs, dtype=np.uint32)

    def order(self, version: PolicyVersion = FIRST, **changes: Any) -> Order:
        fields: dict[str, Any] = {"plan": self.plan, "slots": (self.name,), "checksums": self.checksums}
        fields |= {"carrier": "shared_memory", "kv_policy": "keep", "verify": True, "bucket_bytes": self.bucket_bytes}
        fields |= {"bytes_per_second": None, "timeout_seconds": 10.0}
        return Order(version=version, **(fields | changes))

    def flip(self, offset: int = 3) -> None:
        """Damage one byte; a second call mends it."""
        self.memory[offset] ^= 1

    def remove(self) -> None:
        remove_slot(self.name)


class TwoRankModel:
    """A model in the slots of two ranks, each of which holds half of the rows of every tensor; orders as of StagedModel."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], bucket_bytes: int = 600):
        halves = [self._shards(tensors, rank) for rank in (0, 1)]
        parts = [plan_rank(half, rank=rank, world_size=2, bucket_bytes=bucket_bytes) for rank, half in enumerate(halves)]
        run, self.bucket_bytes, self.plan = f"test{os.getpid()}n{next(_numbers)}", bucket_bytes, merge(parts)
        self.names = tuple(slot_name(run, rank, 0) for rank in (0, 1))
        self.memories = [create_slot(name, part.slot_bytes) for name, part in zip(self.names, parts, strict=True)]
        for part, memory in zip(parts, self.memories, strict=True):
            for shard, at in zip(self._shards(tensors, part.rank), part.shard_offsets, strict=True):
                if at is not None:
                    rows = slice(shard.offset[0], shard.offset[0] + shard.size[0]) if shard.size else ...
                    data = tensors[shard.tensor.name][rows].reshape(-1).view(torch.uint8).numpy().tobytes()
                    memory[at : at + len(data)] = data
        slots = [memoryview(memory) for memory in self.memories]
        crcs = [zlib.crc32(slots[s.rank][s.slot_offset : s.slot_offset + s.num_bytes]) for s in self.plan.slices]
        self.checksums = np.array(crcs, dtype=np.uint32)

    def order(self, version: PolicyVersion = FIRST, **changes: Any) -> Order:
        fields: dict[str, Any] = {"plan": self.plan, "slots": self.names, "checksums": self.checksums}
        fields |= {"carrier": "shared_memory", "kv_policy": "keep", "verify": True, "bucket_bytes": self.bucket_bytes}
        fields |= {"bytes_per_second": None, "timeout_seconds": 10.0}
        return Order(version=version, **(fields | changes))

    def remove(self) -> None:
        for name in self.names:
            remove_slot(name)

    @staticmethod
    def _shards(tensors: Mapping[str, torch.Tensor], rank: int) -> list[Shard]:
        shards = []
        for name, tensor in tensors.items():
            spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if not tensor.shape:
                shards.append(Shard(spec, (), ()) if rank == 0 else Shard(spec, (), (0,)))
                continue
            half = -(-tensor.shape[0] // 2)
            begin, end = (0, half) if rank == 0 else (half, tensor.shape[0])
            rest = tuple(tensor.shape[1:])
            shards.append(Shard(spec, (begin, *(0,) * len(rest)), (end - begin, *rest)))
        return shards
