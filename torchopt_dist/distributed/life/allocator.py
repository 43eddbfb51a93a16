"""The C library's allocator → one that keeps the free memory of all threads in one place."""

from __future__ import annotations

import os

from torchopt_dist._free_memory import glibc

__all__ = ["share_one_arena"]

M_ARENA_MAX = -8
"""The parameter's number in glibc's ``malloc.h``."""


def share_one_arena() -> bool:
    """Let all threads take memory from one arena, on glibc, unless the user has set a limit; returns whether they do.

    Else each thread has an arena, in which the memory that it has freed stays: what a call has used in one thread, the
    next call in another thread takes from the system again.
    """
    asked = (
        os.environ.get("MALLOC_ARENA_MAX"),
        "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""),
    )
    library = glibc()
    if any(asked) or library is None:
        return False
    return bool(library.mallopt(M_ARENA_MAX, 1))
