"""How long until two workers are at work, and until their result is there? Against torchrun, and torchrunx.

Each way starts two workers that tell the time as the first thing they do. "First launch" is a new Python program, from
its start on. "Next launch" is another launch of a program that is running; torchrun, being a program, has no other.
Each is the median of several rounds, all ways in turn. torchrunx is timed if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from page import ratio, table

WORKERS = 2

SCRIPT = """
import os, sys, time
import torch
at = time.time()
with open("at" + os.environ["RANK"], "w") as file:
    file.write(str(at))
"""

OURS = """
import json, sys, time
from torchopt_dist.launching import Launcher
from launch_task import now
launcher = Launcher(nproc_per_host=2, handlers=[])
for _ in range(int(sys.argv[1])):
    started = time.time()
    at = max(launcher.run(now).results["localhost"])
    print("TIMES", json.dumps([started, at, time.time()]), flush=True)
"""

TORCHRUNX = """
import json, os, sys, time
import torchrunx
from launch_task import now
for _ in range(int(sys.argv[1])):
    started = time.time()
    results = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=2, backend=None).run(now)
    at = max(results.rank(rank) for rank in (0, 1))
    print("TIMES", json.dumps([started, at, time.time()]), flush=True)
"""

TASK = """
import time
import torch
def now():
    return time.time()
"""


def run(command: list[str], folder: Path) -> tuple[str, float, float]:
    """What a program prints, when it started, and when it was over."""
    path = os.pathsep.join(
        [str(folder), str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    started = time.time()
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    over = time.time()
    if ended.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout, started, over


def torchrun(folder: Path) -> dict[str, tuple[float, float]]:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}", "script.py"]
    _, started, over = run([sys.executable, *command], folder)
    at = [float((folder / f"at{rank}").read_text()) for rank in range(WORKERS)]
    return {"first launch": (max(at) - started, over - started)}


def python(script: str, folder: Path) -> dict[str, tuple[float, float]]:
    printed, started, _ = run([sys.executable, script, "6"], folder)
    times = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("TIMES")]
    later = [(at - begun, done - begun) for begun, at, done in times[1:]]
    return {
        "first launch": (times[0][1] - started, times[0][2] - started),
        "next launch": (statistics.median(a for a, _ in later), statistics.median(b for _, b in later)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ways = {"torchrun": torchrun, "ours": lambda folder: python("ours.py", folder)}
    if importlib.util.find_spec("torchrunx") is not None:
        ways["torchrunx"] = lambda folder: python("torchrunx_.py", folder)
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (
            ("script.py", SCRIPT),
            ("ours.py", OURS),
            ("torchrunx_.py", TORCHRUNX),
            ("launch_task.py", TASK),
        ):
            (folder / file).write_text(text)
        for _ in range(args.rounds):
            for way, measure in ways.items():
                for kind, measured in measure(folder).items():
                    seconds.setdefault((way, kind), []).append(measured)
    medians = {
        key: tuple(statistics.median(column) for column in zip(*rows, strict=True))
        for key, rows in seconds.items()
    }
    at, done = medians["torchrun", "first launch"]
    table(
        ["", "user code", "result"],
        [
            [f"{way}, {kind}", f"{first:.3f} s ({first / at:.3f})", f"{result:.3f} s ({result / done:.3f})"]
            for (way, kind), (first, result) in medians.items()
        ],
    )
    ours = medians["ours", "next launch"][0]
    for peer in ("torchrun", "torchrunx"):
        their = medians.get((peer, "next launch"), medians.get((peer, "first launch")))
        if their is not None:
            ratio("a launch from a running program", peer, f"{ours / their[0]:.3f}, to user code")


if __name__ == "__main__":
    main()
