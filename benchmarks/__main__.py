"""``python benchmarks [NAME…]`` → the programs run one after the other, and the tables of the pages are written anew.

That is ``make bench``. A program that fails, or takes longer than it may, leaves its place as it was, and is named at
the end. On two quiet cores all take twelve minutes. ``network`` needs root.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from page import stamp, with_output

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SECONDS = 200.0
"""That a program may take."""


class Program(NamedTuple):
    """A program of this folder."""

    name: str
    arguments: tuple[str, ...] = ()
    """Such as make it short enough for a run of all."""
    page: str = "benchmarks.md"


PROGRAMS = (
    Program("distributed_maml"),
    Program("growth"),
    Program("call_overhead"),
    Program("bytes_on_the_wire"),
    Program("optimizer_step"),
    Program("meta_step"),
    Program("maml_peers"),
    Program("network", ("--rounds", "2")),
    Program("many_workers", ("--seconds", "5")),
    Program("kernels"),
    Program("launch", ("--rounds", "3")),
    Program("replaying", ("--rounds", "1")),
    Program("attention", ("--rounds", "1")),
    Program("implicit"),
    Program("evolution_strategies"),
    Program("data_parallel"),
    Program("adjoints_table", page="which_adjoint.md"),
    Program("faults"),
)
"""In this order; the others of this folder are run by hand, and say on their pages when."""


def output_of(program: Program) -> str | None:
    """What a program prints, or ``None`` if it fails; what it says of that is on standard error."""
    command = [sys.executable, f"benchmarks/{program.name}.py", *program.arguments]
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        printed, _ = running.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        for process in [*psutil.Process(running.pid).children(recursive=True), running]:
            process.kill()
        running.communicate()
        print(f"{program.name}: not done after {SECONDS:g} s", file=sys.stderr)
        return None
    return None if running.returncode else printed


def main() -> int:
    """Run those named, or all; returns how many failed."""
    names = [program.name for program in PROGRAMS]
    parser = argparse.ArgumentParser(prog="python benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; none: all")
    chosen = parser.parse_args().names
    if unknown := set(chosen) - set(names):
        parser.error(f"NAME must be one of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    failed = []
    for program in PROGRAMS:
        if chosen and program.name not in chosen:
            continue
        started, before = time.monotonic(), stamp()
        print(f"{program.name} … ", end="", flush=True)
        printed = output_of(program)
        if printed is None:
            failed.append(program.name)
        else:
            path = DOCS / program.page
            path.write_text(with_output(path.read_text("utf-8"), program.name, printed, before), "utf-8")
        print(
            f"{'FAILED' if printed is None else 'written'} after {time.monotonic() - started:.0f} s",
            flush=True,
        )
    if failed:
        print(f"left as they were: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
