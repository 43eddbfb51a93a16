"""The C library's allocator → one that keeps what has been freed, for all threads, until the next call wants it."""

from __future__ import annotations

import os

from torchopt_dist.process.free_memory import glibc

__all__ = ["keep_for_next_call"]

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
