"""What the C library does with memory that is freed: by default it goes back to the system soon, and must be faulted in again."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_ARENAS = 2  # the main one, and one for all other threads
_KEPT_BYTES = 64 << 20  # what glibc comes to by itself in a process that once freed a large array


def few_arenas() -> None:
    """Threads share two arenas. By default each gets its own, up to eight a core, and what one thread allocates and another frees
    (a socket's messages, an optimizer's tensors) makes holes in all of them: a long run's memory creeps up."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)


def keep_freed_memory() -> None:
    """Up to 64 MiB of freed memory stay with this process. A broker's blocks come and go by the megabyte: without this every
    page of them is faulted in anew, a sixth of the broker's time. Elsewhere than on glibc nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)
