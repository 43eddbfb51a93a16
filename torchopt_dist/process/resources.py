"""The machine → this process's share of it: the cores that it may use, memory that the C library keeps."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["give_back", "glibc", "keep_for_next_call", "resident", "usable_cores"]


LEAST = 1 << 24
"""Bytes by which a process may always grow."""
_STATM = Path("/proc/self/statm")
_resident_then = 0
"""Bytes of the process in memory, after memory was last given back."""


def glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def give_back() -> None:
    """Give free pages back, if the process has grown by a sixth, or by 16 MiB if that is more, since the last time.

    Between tensors that stay, glibc keeps what others have left there, and while tensors of many sizes come and go a
    process grows to several times what its tensors take. With another C library nothing is done.
    """
    global _resident_then
    if not _STATM.exists():
        return
    now = resident()
    if now < _resident_then + max(LEAST, _resident_then // 6):
        _resident_then = min(_resident_then, now)
        return
    library = glibc()
    if library is not None:
        library.malloc_trim(0)
    _resident_then = resident()


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""The parameters' numbers in glibc's ``malloc.h``."""
KEPT = 1 << 28
"""Bytes of freed memory that a process keeps at most; all it has, if there is more than that still in use above it."""
LARGEST = 1 << 25
"""Bytes of a block that is kept, the most that glibc allows; a larger one is always taken from the system anew."""


def keep_for_next_call() -> list[int]:
    """Set glibc's parameters, but for those that the user has set; returns the numbers of those that are set here.

    Each thread would have an arena, in which what it has freed stays, and the next call may run in another thread. And
    a call's graph would be given back to the system when it is freed, and taken again page by page: a fifth of the time
    of a vectorized step.
    """
    library, tunables = glibc(), os.environ.get("GLIBC_TUNABLES", "")
    if library is None:
        return []
    return [
        number
        for number, variable, tunable, value in (
            (M_ARENA_MAX, "MALLOC_ARENA_MAX", "arena_max", 1),
            (M_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", "trim_threshold", KEPT),
            (M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", "mmap_threshold", LARGEST),
        )
        if variable not in os.environ and f"glibc.malloc.{tunable}" not in tunables
        if library.mallopt(number, value)
    ]


def usable_cores() -> int:
    """Their number, or, where the system does not say, that of those that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
