"""ParameterSync's line to a server that is updated through SGLang's own endpoints: sync.mode `disk` and `broadcast`.

    slots ──checked──▶ whole tensors ─▶ prepare (off the pause) ─▶ pause ─▶ begin ─▶ load ─▶ end ─▶ go on ─▶ check (receiver)

Both modes hold the server for the whole load, which the staged mode does not; they need nothing of asyncrl inside the server,
but for the comparison of what is live with what was published, which its receiver makes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncrl.errors import AsyncrlError, DeadlineExceeded, DigestMismatch, SyncError
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.channel import NOBODY, RESENDS, Order, Outcome, Progress, ReceiverChannel, not_in_time
from asyncrl.weight_sync.endpoints import PAUSE_MODES, UpdateEndpoints
from asyncrl.weight_sync.slots import SlotMaps
from asyncrl.weight_sync.whole import checkpoint_names, whole_tensors

log = logging.getLogger(__name__)


class Carrier(Protocol):
    """How whole tensors get into the server."""

    async def prepare(self, order: Order, tensors: dict[str, torch.Tensor]) -> None:
        """All that can be done while the server decodes."""

    async def load(self, order: Order, tensors: dict[str, torch.Tensor]) -> None:
        """While it is paused. Raises SyncError, and then nobody can say what it holds."""

    async def close(self) -> None: ...


class HttpChannel:
    """protocols of `ReceiverChannel`, over HTTP. checks: the receiver that compares what is live, where the server has one."""

    def __init__(self, endpoints: UpdateEndpoints, carrier: Carrier, checks: ReceiverChannel | None):
        self.when_lost: Callable[[], None] = lambda: None
        self._endpoints, self._carrier, self._checks = endpoints, carrier, checks
        self._thread = ThreadPoolExecutor(1, "whole-tensors")
        self._tensors: dict[str, torch.Tensor] = {}  # by the trainer's names
        self._named: dict[str, torch.Tensor] = {}  # the same by those of a checkpoint
        self._maps = SlotMaps()
        self._session = secrets.token_hex(8)
        self._told: str | None = None  # the version that this server was brought last
        self._is_busy = False
        if checks is not None:
            checks.when_lost = lambda: self.when_lost()

    async def status(self, timeout: float) -> dict[str, Any]:
        """As a receiver's. A server that says another version than the one it was brought is another process."""
        found = str((await self._endpoints.model_info(timeout)).get("weight_version"))
        if not self._is_busy and self._told is not None and found != self._told:
            self._session, self._told = secrets.token_hex(8), None
        return {"session": self._session, "committed": found if _is_ours(found) else None, "begun": None, "digest": None}

    def cancel(self, version: PolicyVersion) -> None:
        """What has begun ends by its deadlines; the next version begins anew."""

    async def update(self, order: Order, progress: Progress = NOBODY) -> Outcome:
        """Raises what `ReceiverChannel.update` raises."""
        outcome, began = Outcome(), time.monotonic()
        self._is_busy, self._told = True, None
        try:
            async with asyncio.timeout(order.timeout_seconds):
                await self._assemble(order, outcome, progress)
                self._named = checkpoint_names(self._tensors)
                await self._carrier.prepare(order, self._named)
            progress.transferred()
            outcome.transfer_seconds = time.monotonic() - began
            await self._swap(order, outcome)
            self._told = str(order.version)
            await self._verify(order, outcome, progress)
        except TimeoutError:
            raise not_in_time(order, self._endpoints.url) from None
        finally:
            self._is_busy = False
        return outcome

    async def close(self) -> None:
        await self._carrier.close()
        await self._endpoints.close()
        if self._checks is not None:
            await self._checks.close()
        self._thread.shutdown(wait=False)
        self._maps.close()

    async def _assemble(self, order: Order, outcome: Outcome, progress: Progress) -> None:
        for _ in range(1 + RESENDS):
            wrong = await asyncio.get_running_loop().run_in_executor(
                self._thread, whole_tensors, order, self._maps, self._tensors
            )
            outcome.num_bytes += order.plan.num_bytes
            if not wrong:
                return
            outcome.refused += len(wrong)
            progress.refused(len(wrong))
        raise DigestMismatch(
            f"{order.version}: {len(wrong)} slices lay wrong in their slots {1 + RESENDS} times: see whether something else "
            "writes to the staging slots"
        )

    async def _swap(self, order: Order, outcome: Outcome) -> None:
        """One pause round the whole version. What fails in it leaves the server in a state that nobody knows: what runs there is
        ended, so that no token of it is taken for one of a version."""
        endpoints = self._endpoints
        await endpoints.pause(PAUSE_MODES[order.kv_policy])
        began = time.monotonic()
        try:
            await endpoints.begin()
            await self._carrier.load(order, self._named)
            await endpoints.end()
            await endpoints.go_on()
        except BaseException:
            await asyncio.shield(self._give_up())
            raise
        outcome.pause_seconds = time.monotonic() - began

    async def _give_up(self) -> None:
        for what in (self._endpoints.abort_all, self._endpoints.end, self._endpoints.go_on):
            try:
                await what()
            except AsyncrlError as error:
                log.warning("%s", error)

    async def _verify(self, order: Order, outcome: Outcome, progress: Progress) -> None:
        if not order.verify or self._checks is None:
            progress.unverified("unasked")
            return
        try:
            await self._checks.check(order)
        except DigestMismatch:
            progress.unverified("differs")
            raise
        except (SyncError, DeadlineExceeded):
            progress.unverified("unanswered")
            raise
        outcome.verified = True


class DiskCarrier:
    """Safetensors in a folder of this version, complete or absent, which the server reads and nobody else needs afterwards.

    folder: of this server alone, on a file system that it sees too; model_folder: where the files beside the weights
    (config.json, tokenizer) are copied from once."""

    def __init__(self, endpoints: UpdateEndpoints, folder: Path, model_folder: Path):
        self._endpoints, self._folder, self._model_folder = endpoints, folder, model_folder
        self._written: Path | None = None

    async def prepare(self, order: Order, tensors: dict[str, torch.Tensor]) -> None:
        path = self._folder / f"version_{order.version}"
        await asyncio.to_thread(self._write, path, tensors)
        self._written = path

    async def load(self, order: Order, tensors: dict[str, torch.Tensor]) -> None:
        assert self._written is not None, "prepare first"
        await self._endpoints.load_folder(str(self._written), str(order.version))

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, True)

    def _write(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        aside = path.with_name(f"{path.name}.writing")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for file in self._model_folder.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, aside)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            aside / "model.safetensors",
            metadata={"format": "pt"},
        )
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
        for older in self._folder.glob("version_*"):
            if older not in (path, self._written):
                shutil.rmtree(older, ignore_errors=True)


def _is_ours(text: str) -> bool:
    try:
        PolicyVersion.parse(text)
    except ValueError:
        return False
    return True
