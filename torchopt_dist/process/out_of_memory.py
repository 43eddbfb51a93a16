"""The kernel's own count → how many processes of this machine it has killed for lack of memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

__all__ = ["out_of_memory_kills"]

COUNTS = Path("/proc/vmstat")
KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def out_of_memory_kills() -> int:
    """The number since the machine was started, inside control groups or not; 0 if it is unknown."""
    with contextlib.suppress(OSError):
        found = KILLS.search(COUNTS.read_text("utf-8"))
        return int(found[1]) if found else 0
    return 0
