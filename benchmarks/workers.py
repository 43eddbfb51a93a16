"""``start_workers(n)``: this script again, under torchrun; ``interleaved``: functions → seconds, timed in turn."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping


def start_workers(number: int) -> None:
    """Unless torchrun has started this script, start it with ``number`` workers of one thread each, and end."""
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={number}", *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int, warmups: int = 2
) -> dict[str, float]:
    """The median seconds of each function, all of them timed in turn in every round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmups + rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if turn >= warmups:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
