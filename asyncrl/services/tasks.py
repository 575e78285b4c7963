"""Coroutines run beside each other: what every service does with its loops. Nothing started here outlives the call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
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


class OneThread:
    """Blocking calls off the event loop, one after the other on one thread. What they allocate and free then lies in one of the C
    library's arenas; spread over a pool's threads, memory creeps up as each thread's own finds its largest size."""

    def __init__(self, name: str):
        self._executor = ThreadPoolExecutor(1, name)

    async def __call__(self, function: Callable[..., Any], /, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, functools.partial(function, *args))
