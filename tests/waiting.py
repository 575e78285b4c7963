"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def until(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until `holds` (a function or a coroutine function) says so; the test fails when it does not in time."""
    async with asyncio.timeout(seconds):
        while True:
            answer = holds()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(0.002)
