"""``start_workers(n)``: this script again, under torchrun; ``interleaved``: functions → seconds, timed in turn."""

from __future__ import annotations

import os
import subprocess
import sys

from torchopt_dist.bench import interleaved

__all__ = ["interleaved", "start_workers"]


def start_workers(number: int) -> None:
    """Unless torchrun has started this script, start it with ``number`` workers of one thread each, and end."""
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={number}", *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)
