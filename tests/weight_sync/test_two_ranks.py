"""Real FSDP2 shards of two processes arrive as the full state dict, bit for bit."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Literal

import torch

from asyncrl.clock import SystemClock
from asyncrl.services.parameter_sync.service import ParameterSyncService, SyncSettings
from asyncrl.weight_sync.channel import staged_line
from asyncrl.weight_sync.receiver import WeightReceiver
from asyncrl.weight_sync.slots import SHARED_MEMORY
from tests.weight_sync.stand_in import StandInTarget

SHAPES = {
    "embed.weight": (9, 6), "layers.0.weight": (7, 6), "layers.0.bias": (7,),
    "layers.1.weight": (6, 7), "layers.1.bias": (6,), "gain": (1,),
}  # fmt: skip


class Recorder(StandInTarget):
    """Keeps a copy of every version that went live."""

    def __init__(self, dtype: torch.dtype):
        super().__init__({name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()})
        self.seen: list[dict[str, torch.Tensor]] = []

    def commit(self, staged, version, kv_policy):
        report = super().commit(staged, version, kv_policy)
        self.seen.append({name: tensor.clone() for name, tensor in self.live().items()})
        return report


class Servers:
    """ParameterSync and two servers' receivers."""

    def __init__(self, transport: Literal["shared_memory", "zeromq"], wire_dtype: str):
        self.targets = [Recorder(getattr(torch, wire_dtype)) for _ in range(2)]
        self.receivers = [WeightReceiver(target) for target in self.targets]
        settings = SyncSettings(transport=transport, bucket_bytes=64, timeout_seconds=20)
        self.service = ParameterSyncService(settings, connect=staged_line, clock=SystemClock())

    async def start(self) -> str:
        book = {f"inference/{i}": {"http": "", "weights": receiver.start()} for i, receiver in enumerate(self.receivers)}
        address = (await self.service.start())["rpc"]
        self.running = asyncio.create_task(self.service.run(book))
        return address

    async def close(self) -> None:
        await self.service.stop()
        await self.running
        for receiver in self.receivers:
            receiver.close()


async def test_two_ranks_to_two_servers_by_either_carrier(tmp_path: Path):
    routes = {"bfloat16": Servers("shared_memory", "bfloat16"), "float32": Servers("zeromq", "float32")}
    addresses = [f"{await servers.start()},{dtype}" for dtype, servers in routes.items()]
    run_id = f"test{os.getpid()}two"
    program = [sys.executable, str(Path(__file__).with_name("two_ranks.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        await asyncio.create_subprocess_exec(
            *program, str(rank), str(tmp_path / "rendezvous"), str(tmp_path), run_id, *addresses, env=environment
        )
        for rank in range(2)
    ]
    assert await asyncio.wait_for(asyncio.gather(*(rank.wait() for rank in ranks)), 60) == [0, 0]
    for dtype, servers in routes.items():
        for version in range(3):
            full = torch.load(tmp_path / f"{dtype}-{version}.pt")
            assert set(full) == set(SHAPES)
            for target in servers.targets:
                assert all(torch.equal(target.seen[version][name], tensor) for name, tensor in full.items())
        figures = servers.service.summary()["sync"]
        assert (figures["count"], figures["skipped"], figures["verified"]) == (2, 0, True)
        await servers.close()
    assert not list(SHARED_MEMORY.glob(f"asyncrl-{run_id}*"))
