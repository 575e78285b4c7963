"""A rank's publisher against a ParameterSync that only writes down what it hears."""

from __future__ import annotations

import asyncio
import errno
import os
import zlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import DeadlineExceeded, SyncError
from asyncrl.transport.rpc import RpcServer
from asyncrl.weight_sync import publisher as publisher_module
from asyncrl.weight_sync.plan import RankPlan
from asyncrl.weight_sync.publisher import ShmPublisher
from asyncrl.weight_sync.slots import SHARED_MEMORY, SlotMaps
from tests.weight_sync.stand_in import a_model

RUN = f"test{os.getpid()}publisher"


class Listener:
    """Answers as ParameterSync does. `go_on` cleared holds announcements back."""

    def __init__(self) -> None:
        self.registered: dict[str, Any] = {}
        self.staged: list[dict[str, Any]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    def register(self, **fields: Any) -> None:
        self.registered = fields

    def acquire_slot(self, incarnation: int, version: int) -> int:
        return version % 2

    async def on_staged(self, **fields: Any) -> dict[str, float]:
        await self.go_on.wait()
        self.staged.append(fields)
        return {"sync/pause_ms": 1.5}

    def wait_confirmed(self, incarnation: int, version: int, patience: float) -> bool:
        return any(announcement["version"] == version for announcement in self.staged)


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    handlers = {"register": listener.register, "acquire_slot": listener.acquire_slot, "staged": listener.on_staged}
    server = RpcServer({**handlers, "wait_confirmed": listener.wait_confirmed})
    listener.address = await server.start()  # type: ignore[attr-defined]
    yield listener
    await server.close()


def a_publisher(listener: Listener, model: dict[str, torch.Tensor], **fields: Any) -> ShmPublisher:
    settings = {"run_id": RUN, "address": listener.address, "incarnation": 3, "bucket_bytes": 600, "timeout_seconds": 10}
    return ShmPublisher(model.items(), **(settings | fields))


async def test_the_slot_holds_the_cast_shards_and_the_announcement_their_checksums(listener):
    model = a_model()
    publisher = a_publisher(listener, model, wire_dtype="bfloat16")
    await asyncio.to_thread(publisher.register)
    assert await asyncio.to_thread(publisher.acquire, 1) == 1
    held = await asyncio.to_thread(publisher.stage, 1, 1)
    assert 0 <= held < 5
    assert await asyncio.to_thread(publisher.wait_confirmed, 1, 5.0)
    plan = RankPlan.from_wire(listener.registered["plan"])
    data = np.frombuffer(SlotMaps().open(listener.registered["slots"][1]), np.uint8)
    for tensor, at in zip(model.values(), plan.shard_offsets, strict=True):
        cast = tensor.to(torch.bfloat16).reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(data[at : at + len(cast)], cast)
    crcs = [zlib.crc32(data[s.slot_offset : s.slot_offset + s.num_bytes]) for s in plan.slices]
    assert listener.staged[0]["checksums"].tolist() == crcs
    assert publisher.latest() == {"sync/pause_ms": 1.5}
    await asyncio.to_thread(publisher.close)


async def test_slots_stand_in_shared_memory_under_the_runs_name_until_it_is_closed(listener):
    publisher = a_publisher(listener, a_model(), rank=0)
    await asyncio.to_thread(publisher.register)
    assert {path.name for path in SHARED_MEMORY.glob(f"asyncrl-{RUN}*")} == {f"asyncrl-{RUN}-r0-s0", f"asyncrl-{RUN}-r0-s1"}
    await asyncio.to_thread(publisher.close)
    assert not list(SHARED_MEMORY.glob(f"asyncrl-{RUN}*"))
    await asyncio.to_thread(publisher.close)


async def test_a_slot_is_not_written_over_before_its_version_was_announced(listener):
    model = a_model()
    publisher = a_publisher(listener, model)
    await asyncio.to_thread(publisher.register)
    listener.go_on.clear()
    await asyncio.to_thread(publisher.stage, 1, 0)
    second = asyncio.create_task(asyncio.to_thread(publisher.stage, 2, 0))
    await asyncio.sleep(0.1)
    assert not second.done()
    listener.go_on.set()
    await second
    await asyncio.to_thread(publisher.wait_confirmed, 2, 5.0)
    assert [announcement["version"] for announcement in listener.staged] == [1, 2]
    await asyncio.to_thread(publisher.close)


async def test_a_silent_parameter_sync_is_named_by_a_deadline(listener, monkeypatch):
    monkeypatch.setattr(publisher_module, "_TRY_SECONDS", 0.2)
    publisher = a_publisher(listener, a_model(), timeout_seconds=0.2)
    await asyncio.to_thread(publisher.register)
    listener.go_on.clear()
    await asyncio.to_thread(publisher.stage, 1, 0)
    with pytest.raises(DeadlineExceeded, match="staged at tcp://"):
        await asyncio.to_thread(publisher.stage, 2, 1)
    await asyncio.to_thread(publisher.close)


async def test_full_shared_memory_is_an_error_with_its_remedy(listener, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    publisher = a_publisher(listener, a_model())
    with pytest.raises(SyncError, match="/dev/shm is full: free some"):
        await asyncio.to_thread(publisher.register)
    assert not list(SHARED_MEMORY.glob(f"asyncrl-{RUN}*"))
