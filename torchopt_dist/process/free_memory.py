"""Memory that the C library keeps for later → given back to the system, when the process has grown."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["give_back", "glibc", "resident"]

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
