"""A function → the processor time that a call takes, and the memory, above what the process had before."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["in_turn", "measured", "resident"]


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measured(run: Callable[[], list[Tensor]], first: Callable[[], Any]) -> dict[str, Any]:
    """Measure one call.

    Args:
        run: what is measured; it returns gradients.
        first: called before, so that torch has loaded what it needs.

    Returns:
        ``seconds`` of processor time, which others on the machine disturb less; ``bytes``; ``norms`` of the gradients.
    """
    first()
    before, start = resident(), time.process_time()
    grads = run()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "bytes": peak - before,
        "norms": [grad.double().norm().item() for grad in grads],
    }


def in_turn(program: str, name: str, ways: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Run ``program --case name way`` for each way, in turn and so often; medians of what :func:`measured` gives."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            command = [sys.executable, program, "--case", name, way]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[way].append(json.loads(done.stdout))
    return {
        way: {
            "seconds": statistics.median(one["seconds"] for one in ones),
            "bytes": statistics.median(one["bytes"] for one in ones),
            "norms": ones[0]["norms"],
        }
        for way, ones in found.items()
    }
