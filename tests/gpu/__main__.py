"""``python -m tests.gpu [PART…]`` → each part run within its limit, a line as it ends, and a table at the end.

Where there are cores for it, all tests run side by side, and the figures after them.
``run.sh`` calls it when the package is built. What each part has found is in ``RESULTS``, JSON beside text, from the
moment on when it is known; so a run that is cut off has told all that it had. Returns the number of failures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

import torchopt_dist as todist
from tests.gpu.parts import PARTS, Part

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("RESULTS", ROOT / "build" / "gpu"))
GPU = torch.cuda.is_available()
PLUGINS = {"xdist": "xdist.plugin", "pytest_timeout": "pytest_timeout"}
"""Those of pytest that are used, by the module that has them; what else is installed there stays out."""
IGNORED = (
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # torch 2.11 uses it, under Python 3.12
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context",  # in the first backward of a process
)
"""What torch says of itself."""
PATIENCE = 8
"""How many times its limit a part may take on a CPU, which may be busy."""
ROOM = 8
"""From so many cores on, and with a GPU, the tests of all parts run side by side."""
SLACK = 5.0
"""Seconds that a part has to end itself after its limit."""


def command_of(part: Part, *, quick: bool) -> list[str]:
    """What runs a part."""
    tests = part.tests if GPU or part.dry is None else part.dry
    if not part.tests:
        return [sys.executable, "-m", "tests.gpu.figures", *(() if GPU else ("--dry",))]
    there = [plugin for module, plugin in PLUGINS.items() if importlib.util.find_spec(module)]
    options = ["-q", "--no-header", "-m", "", "-p", "no:cacheprovider"]
    options += [word for text in IGNORED for word in ("-W", text)]
    options += [word for plugin in ("tests.gpu.record", *there) for word in ("-p", plugin)]
    if quick and part.quick:
        options += ["-k", part.quick]
    processes = min(part.processes, len(os.sched_getaffinity(0)) // 2)
    if processes > 1 and "xdist.plugin" in there:
        options += ["-n", str(processes), "--dist", "load", "--maxschedchunk", "4"]
    return [sys.executable, "-m", "pytest", *options, *tests]


def run(part: Part, *, quick: bool) -> dict[str, Any]:
    """Run a part → its row; what it prints goes to a file."""
    record, printed = RESULTS / f"{part.name}.jsonl", RESULTS / f"{part.name}.txt"
    record.unlink(missing_ok=True)
    started = time.monotonic()
    env = {**os.environ, "GPU_RECORD": str(record), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with printed.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command_of(part, quick=quick),
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(part.seconds * (1 if GPU else PATIENCE))
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(SLACK)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    rows = [json.loads(line) for line in record.read_text("utf-8").splitlines()] if record.exists() else []
    count = Counter(row["outcome"] for row in rows)
    failures = [row for row in rows if row["outcome"] == "failed"]
    how = "not done in time" if code is None else "ok" if code == 0 else f"exit code {code}"
    if code == 0 and count["passed"] + count["told"] == 0:
        how, code = "nothing ran", 1
    made = {
        "part": part.name,
        "what": part.what,
        "how": how,
        "seconds": round(time.monotonic() - started, 1),
        **{outcome: count[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": len(failures) or int(code != 0),
        "rows": rows,
    }
    (RESULTS / f"{part.name}.json").write_text(json.dumps(made, indent=1), "utf-8")
    tell(made, failures, printed)
    return made


def tell(made: dict[str, Any], failures: list[dict[str, Any]], printed: Path) -> None:
    """Print a part's line, and what has failed."""
    print(
        f"{made['part']:9} {made['how']}: {made['passed']} passed, {made['failed']} failed, "
        f"{made['skipped']} skipped, {made['seconds']:.0f} s",
        flush=True,
    )
    for row in failures[:20]:
        last = [line for line in row["why"].splitlines() if line.startswith("E ")] or row["why"].splitlines()[
            -1:
        ]
        print(f"    {row['test']}\n        {last[0][:300]}", flush=True)
    if made["failures"] and not failures:
        print("    " + "\n    ".join(printed.read_text("utf-8").splitlines()[-15:]), flush=True)


def machine() -> str:
    """The card, the driver, the versions and the day, in one line."""
    card = torch.cuda.get_device_name(0) if GPU else "no GPU"
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
    driver = ""
    if GPU:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        driver = f", driver {found or 'unknown'}"
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{card}{driver}, {', '.join(f'{name} {value}' for name, value in versions.items() if value)}, {today}"


def table(made: list[dict[str, Any]]) -> str:
    """What ``docs/benchmarks.md`` takes as it is."""
    lines = ["| part | | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    for row in made:
        numbers = " | ".join(str(row[name]) for name in ("passed", "failed", "skipped"))
        lines.append(f"| {row['what']} | {row['how']} | {numbers} | {row['seconds']:.0f} |")
    for row in made:
        figures = [each for each in row["rows"] if "table" in each]
        for name in dict.fromkeys(each["table"] for each in figures):
            cells = [each["cells"] for each in figures if each["table"] == name]
            lines += ["", f"{name}:", "", f"| {' | '.join(cells[0])} |", f"|{'---|' * len(cells[0])}"]
            lines += [f"| {' | '.join(cell.values())} |" for cell in cells]
    return "\n".join([*lines, "", f"`tests/gpu/run.sh`, {machine()}."])


def main() -> int:
    """Run the parts that are named, or all."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; none: all")
    parser.add_argument(
        "--quick", action="store_true", help="some of each part, without a GPU in at most 60 s"
    )
    args = parser.parse_args()
    chosen = args.parts
    if unknown := set(chosen) - set(names):
        parser.error(f"PART must be one of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    why = todist.ops.why_not("adam", "cuda")
    print(f"{machine()}\nCUDA kernels: {'there' if why is None else why}", flush=True)
    parts = [part for part in PARTS if not chosen or part.name in chosen]
    made: dict[str, dict[str, Any]] = {}
    side_by_side = GPU and len(os.sched_getaffinity(0)) >= ROOM
    for group in ([part for part in parts if part.tests], [part for part in parts if not part.tests]):
        with ThreadPoolExecutor(max(1, len(group)) if side_by_side else 1) as pool:
            for done in as_completed([pool.submit(run, part, quick=args.quick) for part in group]):
                made[done.result()["part"]] = done.result()
                (RESULTS / "table.md").write_text(table(in_order(made)) + "\n", "utf-8")
    print(f"\n{table(in_order(made))}", flush=True)
    return sum(row["failures"] for row in made.values())


def in_order(made: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of parts, in the parts' order."""
    return [made[part.name] for part in PARTS if part.name in made]


if __name__ == "__main__":
    sys.exit(min(main(), 125))
