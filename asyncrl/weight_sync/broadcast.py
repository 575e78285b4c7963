"""sync.mode `broadcast`: ParameterSync is rank 0 of a process group with each server, and sends flattened buckets.

| thread    | consumes   | waits for                 | is unblocked by              |
|-----------|------------|---------------------------|------------------------------|
| broadcast | buckets    | the server's part         | the server; the group's timeout |

Two buckets are under way: while the server loads one, the next is told and sent. NCCL where this process and the server have
GPUs, else gloo.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from asyncrl.errors import SyncError
from asyncrl.transport import security
from asyncrl.transport.ports import free_port
from asyncrl.weight_sync.channel import Order
from asyncrl.weight_sync.endpoints import UpdateEndpoints
from asyncrl.weight_sync.whole import groups

UNDER_WAY = 2


class BroadcastCarrier:
    """Carries whole tensors to one server. tensor_parallel: processes of the server that take part."""

    def __init__(self, endpoints: UpdateEndpoints, *, tensor_parallel: int = 1, timeout_seconds: float):
        self._endpoints, self._world_size, self._timeout = endpoints, 1 + tensor_parallel, timeout_seconds
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._thread = ThreadPoolExecutor(1, "broadcast")
        self._group: Any = None
        self._name = ""

    async def prepare(self, order: Order, tensors: dict[str, torch.Tensor]) -> None:
        """Meet the server in a group, when there is none yet, or the last one broke."""
        if self._group is not None:
            return
        door, name = security.door(), f"asyncrl-{secrets.token_hex(4)}"
        host, port = _known_host(door), free_port(door.host)
        joins = asyncio.create_task(
            self._endpoints.join_group(host, port, world_size=self._world_size, name=name, backend=self._backend)
        )
        try:
            self._group = await self._in_thread(self._meet, host, port, name)
            await joins
        except BaseException:
            joins.cancel()
            await asyncio.gather(joins, return_exceptions=True)
            self._forget()
            raise
        self._name = name

    async def load(self, order: Order, tensors: dict[str, torch.Tensor]) -> None:
        parts = groups(tensors, order.bucket_bytes)
        underway: list[asyncio.Task[None]] = []
        try:
            for number, part in enumerate(parts, 1):
                if len(underway) >= UNDER_WAY:
                    await underway.pop(0)
                version = str(order.version) if number == len(parts) else None
                underway.append(asyncio.create_task(self._send(part, tensors, version)))
            for sent in underway:
                await sent
        except BaseException:
            for sent in underway:
                sent.cancel()
            await asyncio.gather(*underway, return_exceptions=True)
            self._forget()  # a group of which a member gave up cannot be used any more
            raise

    async def close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(SyncError):
                await self._endpoints.leave_group(self._name)
        self._forget()
        self._thread.shutdown(wait=False)

    async def _send(self, part: list[str], tensors: dict[str, torch.Tensor], version: str | None) -> None:
        told = self._endpoints.receive(
            part,
            [str(tensors[name].dtype).removeprefix("torch.") for name in part],
            [list(tensors[name].shape) for name in part],
            group=self._name,
            version=version,
        )
        flat = torch.cat([tensors[name].flatten().view(torch.uint8) for name in part])
        await asyncio.gather(told, self._in_thread(self._broadcast, flat))

    def _broadcast(self, flat: torch.Tensor) -> None:
        try:
            dist.broadcast(flat.to(self._device), src=0, group=self._group)
        except RuntimeError as error:  # the backend's own, whatever the cause
            raise SyncError(f"the server at {self._endpoints.url} left the broadcast: {error}") from error

    def _meet(self, host: str, port: int, name: str) -> Any:
        """As SGLang meets it: a store, a prefix of the group's name, and a group that is not the default one."""
        timeout = datetime.timedelta(seconds=self._timeout)
        try:
            store, _, _ = next(c10d.rendezvous(f"tcp://{host}:{port}", 0, self._world_size, timeout=timeout))
            store.set_timeout(timeout)
            prefixed = c10d.PrefixStore(name, store)
            group, _ = c10d._new_process_group_helper(
                self._world_size, 0, [], c10d.Backend(self._backend), prefixed, group_name=name, timeout=timeout
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise SyncError(f"the server at {self._endpoints.url} did not come to the process group: {error}") from error
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self._world_size)}
        return group

    def _forget(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(self._group)
        self._group = None

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _known_host(door: security.Door) -> str:
    return socket.gethostbyname(door.reached_at)
