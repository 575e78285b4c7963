"""What the C library does with memory that is freed: by default it goes back to the system soon, and must be faulted in again."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_KEPT_BYTES = 64 << 20  # what glibc comes to by itself in a process that once freed a large array


def keep_freed_memory() -> None:
    """Up to 64 MiB of freed memory stay with this process. A broker's blocks come and go by the megabyte: without this every
    page of them is faulted in anew, a sixth of the broker's time. Elsewhere than on glibc nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)
