"""What follows from a fault, and how soon? Prints the table of ``docs/benchmarks.md``.

Each row of ``tests/faults/table.py`` happens five times among three workers of plain ``python``, and as often in a
launch. The median counts, of the seconds from the fault to the end of the last rank, or until the launch has returned
or raised. Then the agent of a real ``torchrun`` is killed.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.faults.table import FAULTS, Fault, launch, run

ROOT = Path(__file__).parents[1]
ROUNDS = 5
PATIENCE = 2.0
PROGRAM = """
import os, sys, time
import torchopt_dist as todist

@todist.auto_init_rpc()
def main():
    open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
    time.sleep(100)

main()
"""


def measure(
    fault: Fault, way: Callable[[Fault, Path, float], tuple[Any, float]], check: Callable[[Any], None]
) -> float:
    seconds = []
    for _ in range(ROUNDS if not fault.waits else 1):
        with tempfile.TemporaryDirectory() as folder:
            outcome, took = way(fault, Path(folder), PATIENCE)
        check(outcome)
        seconds.append(took)
    return statistics.median(seconds)


def orphans(size: int = 3) -> float:
    """Seconds from the end of torchrun's agent to the end of its workers."""
    with tempfile.TemporaryDirectory() as name:
        folder, program = Path(name), Path(name) / "program.py"
        program.write_text(PROGRAM)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        with subprocess.Popen(
            [*command, str(program), name],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        ) as agent:
            pids: list[int] = []
            while len(pids) < size:
                time.sleep(0.05)
                pids = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
            workers = [psutil.Process(pid) for pid in pids]
            agent.send_signal(signal.SIGKILL)
            started = time.monotonic()
            assert not psutil.wait_procs(workers, timeout=60)[1]
            return time.monotonic() - started


def main() -> None:
    print("| fault | what follows | within | measured | in a launch |")
    print("|---|---|---|---|---|")
    for fault in FAULTS:
        bound = f"the patience + {fault.within:g} s" if fault.waits else f"{fault.within:g} s"
        measured = f"{measure(fault, run, fault.check):.2f} s"
        if fault.waits:
            measured += f" with a patience of {PATIENCE:g} s"
        launched = f"{measure(fault, launch, fault.launched):.2f} s"
        print(f"| {fault.name} | {fault.follows} | {bound} | {measured} | {launched} |", flush=True)
    print(
        "| torchrun's agent is killed | its workers end, after their `finally` blocks | "
        f"5 s | {orphans():.2f} s | |"
    )


if __name__ == "__main__":
    main()
