"""The C library's allocator → one that keeps the free memory of all threads in one place."""

from __future__ import annotations

import os

from torchopt_dist._free_memory import glibc

__all__ = ["share_one_arena"]

M_ARENA_MAX = -8
"""The parameter's number in glibc's ``malloc.h``."""


def share_one_arena() -> bool:
    """Let all threads take memory from one arena, if the C library is glibc, and the user has set no limit.

    By default each thread has an arena of its own, in which the memory that it has freed stays. What a call has used in
    one thread, the next call in another thread takes from the system again: the process grows by that with every
    thread, and its pages must be mapped again.

    Returns:
        Whether the limit is set.
    """
    asked = (
        os.environ.get("MALLOC_ARENA_MAX"),
        "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""),
    )
    library = glibc()
    if any(asked) or library is None:
        return False
    return bool(library.mallopt(M_ARENA_MAX, 1))
