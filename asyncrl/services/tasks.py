"""Coroutines run beside each other: what every service does with its loops. Nothing started here outlives the call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def first_to_end(*work: Coroutine[Any, Any, Any]) -> None:
    """Until one ends; the others are cancelled, and what it raised is raised."""
    await _run(work, asyncio.FIRST_COMPLETED)


async def all_to_end(*work: Coroutine[Any, Any, Any]) -> None:
    """Until all end, or one raises: then the others are cancelled, and that is raised."""
    await _run(work, asyncio.FIRST_EXCEPTION)


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel them, and return when each has ended, however it did."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that made a task group's members end."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(work: Sequence[Coroutine[Any, Any, Any]], until: str) -> None:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=until)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        await cancel(tasks)
