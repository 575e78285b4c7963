"""SGLang's own endpoints for new weights, each call by a deadline.

A refusal (400) or a silence in the middle of an update leaves a server of which nobody can say what it holds: some refusals come
after the weights were changed. So both are `UnknownState`, and the server is STALE until a whole version is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from asyncrl.errors import DeadlineExceeded, SyncError
from asyncrl.protocols.weights import KvPolicy

PAUSE_MODES: Mapping[KvPolicy, str] = {"keep": "in_place", "recompute": "retract"}


class UnknownState(SyncError):
    """A server refused a call of an update, or did not answer it."""


class UpdateEndpoints:
    """One server's. `timeout_seconds`: of each call."""

    def __init__(self, url: str, *, token: str | None, timeout_seconds: float):
        self.url, self._timeout = url, timeout_seconds
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else None
        self._session: aiohttp.ClientSession | None = None

    async def pause(self, mode: str) -> None:
        """mode: in_place or retract."""
        await self._post("pause_generation", {"mode": mode})

    async def abort_all(self) -> None:
        """End every request that it has; works while it is paused, which a pause of mode abort does not."""
        await self._post("abort_request", {"abort_all": True})

    async def go_on(self) -> None:
        await self._post("continue_generation", {})

    async def begin(self) -> None:
        await self._post("begin_weight_update", {})

    async def end(self) -> None:
        await self._post("end_weight_update", {})

    async def load_folder(self, folder: str, version: str) -> None:
        """Have it read safetensors from a folder that it sees."""
        await self._post("update_weights_from_disk", {"model_path": folder, "weight_version": version, "flush_cache": False})

    async def join_group(self, host: str, port: int, *, world_size: int, name: str, backend: str) -> None:
        """Have it join a process group whose rank 0 waits at host and port."""
        group = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world_size}
        await self._post("init_weights_update_group", {**group, "group_name": name, "backend": backend})

    async def leave_group(self, name: str) -> None:
        await self._post("destroy_weights_update_group", {"group_name": name})

    async def receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], *, group: str, version: str | None
    ) -> None:
        """Have it take one flattened bucket from rank 0. version: of the whole, told with its last bucket."""
        bucket = {"names": names, "dtypes": dtypes, "shapes": shapes, "load_format": "flattened_bucket"}
        await self._post(
            "update_weights_from_distributed",
            {**bucket, "group_name": group, "weight_version": version, "flush_cache": False},
        )

    async def model_info(self, timeout: float) -> dict[str, Any]:
        """Raises DeadlineExceeded where no answer comes."""
        try:
            async with asyncio.timeout(timeout), self._open().get(f"{self.url}/model_info") as answer:
                answer.raise_for_status()
                return dict(await answer.json())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise DeadlineExceeded(f"the server at {self.url} did not answer: {str(error) or type(error).__name__}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=self._timeout))
        return self._session

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            async with self._open().post(f"{self.url}/{path}", json=body) as answer:
                text = await answer.text()
        except TimeoutError:
            raise UnknownState(
                f"the server at {self.url} did not answer {path} within {self._timeout:g} s (sync.timeout_seconds)"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnknownState(
                f"the server at {self.url} was lost during {path}: {str(error) or type(error).__name__}"
            ) from error
        if answer.status != 200:
            raise UnknownState(f"the server at {self.url} refused {path} (HTTP {answer.status}): {text[:300]}")
