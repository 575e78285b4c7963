"""Where the ranks meet, and how rank 0's bytes reach all of them by a deadline.

Rank 0 opens the meeting point (a TCP store on a free port) and its address travels in the address book; nobody guesses a port.
Bytes go over a gloo group of their own, on the CPU, whatever carries the gradients. What other threads do together goes over side
groups: two threads never share a group.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

from asyncrl.errors import DeadlineExceeded, TransportError
from asyncrl.transport.hosts import interface_of


def open_meeting_point(host: str = "127.0.0.1", *, timeout_seconds: float = 120.0) -> tuple[dist.TCPStore, str]:
    """(store, "host:port") of rank 0; the store must live as long as the group. It listens at `host` alone: left to itself it
    listens everywhere, and it asks nobody for a key."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
    return store, f"{host}:{port}"


class RankGroup:
    """This process's place among the trainer's ranks. One per process."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: dist.Store,
        device: torch.device,
        timeout_seconds: float,
        host: str = "127.0.0.1",
    ):
        """host: this rank's own address, at which its gloo groups listen where the ranks do not meet on loopback."""
        self.rank, self.world_size = rank, world_size
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if world_size == 1 or store_is_local(store):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        elif interface := interface_of(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=self._timeout)
        self._control = dist.new_group(backend="gloo", timeout=self._timeout) if backend != "gloo" else dist.group.WORLD

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's payload on every rank. Raises DeadlineExceeded when a peer does not come in time, TransportError when one is
        gone."""
        if self.world_size == 1:
            assert payload is not None, "rank 0 has the payload"
            return payload
        sent = payload or b""
        try:
            length = torch.tensor([len(sent)], dtype=torch.int64)
            dist.broadcast(length, 0, group=self._control)
            data = torch.empty(int(length), dtype=torch.uint8)
            if sent:
                data.copy_(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
            if len(data):
                dist.broadcast(data, 0, group=self._control)
        except RuntimeError as error:
            raise self._named(error) from error
        return data.numpy().tobytes()

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, by rank, on every rank. Raises as `broadcast` does."""
        if self.world_size == 1:
            return [text]
        try:
            return _gather_texts(text, self._control, self.world_size)
        except RuntimeError as error:
            raise self._named(error) from error

    def side_group(self, timeout_seconds: float) -> SideGroup:
        """A group of the same ranks for another thread. Called on every rank, by the thread that makes all other calls here."""
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
        return SideGroup(group, self.world_size, self._named)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _named(self, error: RuntimeError) -> TransportError:
        text = str(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            seconds = self._timeout.total_seconds()
            return DeadlineExceeded(
                f"trainer/{self.rank}: a peer did not come within {seconds:.0f} s (training.step_timeout_seconds)"
            )
        return TransportError(f"trainer/{self.rank}: another trainer rank is gone: {text.splitlines()[0]}")


class SideGroup:
    """The ranks as one other thread of each sees them, over gloo."""

    def __init__(self, group: dist.ProcessGroup, world_size: int, named: Callable[[RuntimeError], TransportError]):
        self.group, self._world_size, self._named = group, world_size, named

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, by rank, on every rank. Raises as `RankGroup.broadcast` does."""
        try:
            return _gather_texts(text, self.group, self._world_size)
        except RuntimeError as error:
            raise self._named(error) from error

    def close(self) -> None:
        """No thread is inside."""
        dist.destroy_process_group(self.group)


def _gather_texts(text: str, group: dist.ProcessGroup | None, world_size: int) -> list[str]:
    """Two rounds: lengths, then bytes padded to the longest."""
    mine = text.encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(1, *(int(length) for length in lengths))
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(padded, torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8), group=group)
    pairs = zip(padded, lengths, strict=True)
    return [data[: int(length)].numpy().tobytes().decode() for data, length in pairs]


def store_is_local(store: dist.Store) -> bool:
    """Whether all ranks meet on this host's loopback."""
    return getattr(store, "host", "127.0.0.1") in ("127.0.0.1", "localhost")


def loopback_interface() -> str:
    """The name of the loopback interface, for gloo."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])
