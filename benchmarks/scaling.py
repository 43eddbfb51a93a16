"""How does a step's time grow with the workers? A model fitted on 1 to 32, held against others; what it says of more.

    python benchmarks/scaling.py [--write] [--again]

Tasks sleep, so that they run at the same time whatever the cores. `--write` puts the figures into docs/scaling.md, of
which the picture there is drawn.
"""

from __future__ import annotations

import argparse
import ast
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from page import stamp, with_output
from torch import Tensor, nn
from torch.distributed import rpc
from workers import interleaved

import torchopt_dist as todist

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.processes import World

FITTED, HELD_OUT = (1, 2, 4, 8, 16, 32), (3, 6, 12, 24)
SIDES = (64, 256, 512)
WORK = 0.1
ROUNDS = 6
EFFICIENCIES = (0.01, 0.03, 0.1, 0.3, 1.0, 5.0)
PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
MEASURED = Path(__file__).parents[1] / "outputs" / "scaling.txt"


# --- What is measured -----------------------------------------------------------------------------------------


@todist.parallelize(todist.tasks, todist.mean_reducer)
def task_loss(model: nn.Linear, x: Tensor, seconds: Tensor) -> Tensor:
    time.sleep(seconds.item())
    return (model.weight * x).mean()


def stepper(side: int, seconds: float, *, replicated: bool) -> Callable[[], None]:
    """A step with one task a worker: forward, backward, and the optimizer's step."""
    model = nn.Linear(side, side, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(todist.get_world_size())
    work = torch.full_like(x, seconds)
    mirror = todist.mirror(model, optimizer) if replicated else None

    def step() -> None:
        model.zero_grad()
        task_loss(mirror or model, x, work).backward()
        (mirror or optimizer).step()

    return step


Figures: TypeAlias = dict[tuple[str, int], tuple[float, float]]
"""For each way and each number of bytes, seconds of a step beyond its work, and of them those of the caller's CPU."""


def measure() -> Figures:
    """Time all ways in turn in every round; the least seconds, since the machine has other guests."""
    ways: dict[tuple[str, int], Callable[[], object]] = {}
    for side in SIDES:
        for way in ("star", "mirror"):
            ways[way, 4 * side**2] = stepper(side, WORK, replicated=way == "mirror")
    size = todist.get_world_size()

    def raw() -> None:
        futures = [rpc.rpc_async(f"worker{rank}", time.sleep, (WORK,)) for rank in range(1, size)]
        time.sleep(WORK)
        for future in futures:
            future.wait()

    def ours() -> None:
        todist.remote_sync_call(
            time.sleep, partitioner=lambda: [(rank, (WORK,), None) for rank in range(size)]
        )

    ways |= {("call", 0): ours, ("raw rpc_async", 0): raw}
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(2 + ROUNDS):
        for name, function in ways.items():
            began = time.perf_counter(), time.process_time()
            function()
            figures = time.perf_counter() - began[0] - WORK, time.process_time() - began[1]
            if turn >= 2:
                taken[name].append(figures)
    return {
        name: (min(wall for wall, _ in rows), statistics.median(cpu for _, cpu in rows))
        for name, rows in taken.items()
    }


def efficiency() -> list[float]:
    """The part of a step's time that is work, for each length of a task."""
    found = []
    for seconds in EFFICIENCIES:
        step = stepper(SIDES[1], seconds, replicated=False)
        rounds = 5 if seconds < 0.5 else 1
        found.append(seconds / interleaved({"step": step}, rounds=rounds, warmups=1)["step"])
    return found


# --- The model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Seconds of a step beyond its work: ``fixed + nbytes * own + (W - 1) * (worker + nbytes * byte)``.

    Attributes:
        fixed: of a step, whatever the workers.
        own: for each byte of the model, whatever the workers.
        worker: for each worker, mostly Python.
        byte: for each worker and each byte of the model.
    """

    fixed: float
    own: float
    worker: float
    byte: float

    @classmethod
    def fit(cls, points: dict[tuple[int, int], float]) -> Cost:
        """By least squares of the relative error of a whole step; by the number of workers, and of bytes."""
        rows, values = [], []
        for (size, nbytes), seconds in points.items():
            weight = 1 / (WORK + seconds)
            others = size - 1
            rows.append([weight * part for part in (1, nbytes, others, others * nbytes)])
            values.append(weight * seconds)
        solution: Any = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
        return cls(*(float(max(part, 0.0)) for part in solution))

    def seconds(self, size: int, nbytes: int) -> float:
        """What the model says."""
        return self.fixed + nbytes * self.own + (size - 1) * (self.worker + nbytes * self.byte)


LINE = 10e9 / 8  # bytes a second
LATENCY = 50e-6
CHUNK = 1 << 20
MODEL = 100_000_000
FAN_OUT = 2


def on_hosts(cpu: Cost, way: str, size: int) -> float:
    """Seconds beyond the work of a step of a model of 100 MB, each worker on a host of its own with 10 Gbit/s.

    Args:
        cpu: of the caller, for this way; in a tree and with a mirror it handles its own bytes only.
        way: star, tree or mirror.
        size: the number of workers.
    """
    python = cpu.fixed + MODEL * cpu.own + (size - 1) * cpu.worker
    if way == "star":
        return python + (size - 1) * MODEL * max(cpu.byte, 2 / LINE)
    if way == "tree":
        return python + 2 * arrival(grown(size, FAN_OUT), MODEL)[0]
    return python + 2 * (size - 1) * (MODEL / size / LINE + LATENCY)  # a ring's all-reduce


# --- The tree -------------------------------------------------------------------------------------------------


def grown(size: int, fan_out: int) -> list[list[int]]:
    """Children by rank: in each round everybody who has the message hands it on to one more."""
    children: list[list[int]] = [[] for _ in range(size)]
    having, following = [0], 1
    while following < size:
        for parent in having[:]:
            if following < size and len(children[parent]) < fan_out:
                children[parent].append(following)
                having.append(following)
                following += 1
    return children


def arrival(
    children: list[list[int]], nbytes: int, deaths: dict[int, float] | None = None
) -> tuple[float, list[int]]:
    """Send a message down a tree in chunks, each line carrying one at a time.

    Args:
        children: by rank.
        nbytes: of the message.
        deaths: when workers die.

    Returns:
        When the last of those that get all of it has it, and who does not.
    """
    chunks = max(1, math.ceil(nbytes / CHUNK))
    seconds = nbytes / chunks / LINE
    deaths = deaths or {}
    has = {0: [0.0] * chunks}
    last, without = 0.0, []
    for parent in range(len(children)):  # a child's rank is above its parent's
        own = has.pop(parent)
        alive = deaths.get(parent, math.inf)
        if own[-1] < alive:
            last = max(last, own[-1])
        else:
            without.append(parent)
        free = 0.0
        got: dict[int, list[float]] = {child: [] for child in children[parent]}
        for at in own:
            for child in children[parent]:
                free = max(free, at) + seconds
                got[child].append(free + LATENCY if free < alive else math.inf)
        has.update(got)
    return last, without


def with_failures(size: int, dying: int, rounds: int = 200) -> tuple[float, float, float]:
    """Of many random cases: calls that fail for each worker that dies, seconds of the first tree, and of the next.

    The next is a tree of those that live and have not got it; nothing is counted for noticing the loss.
    """
    draw = random.Random(0)
    children = grown(size, FAN_OUT)
    whole, _ = arrival(children, MODEL)
    failing, first, following = [], [], []
    for _ in range(rounds):
        deaths = {rank: draw.uniform(0, whole) for rank in draw.sample(range(1, size), dying)}
        seconds, without = arrival(children, MODEL, deaths)
        first.append(seconds)
        failing.append(len(without) / dying)
        left = [rank for rank in without if rank not in deaths]
        following.append(arrival(grown(len(left) + 1, FAN_OUT), MODEL)[0] if left else 0.0)
    return float(np.mean(failing)), float(np.mean(first)), float(np.mean(following))


# --- The page -------------------------------------------------------------------------------------------------


WAYS = ("star", "mirror")


def report(measured: dict[int, Figures], efficiencies: dict[int, list[float]]) -> Iterator[str]:
    """The lines of the page's written part."""
    walls, cpus = costs(measured, 0), costs(measured, 1)
    yield from fit_table(measured, walls, cpus)
    yield from ["", "## Efficiency over the work of a task", ""]
    sizes = sorted(efficiencies)
    yield row("work of a task", *(f"{which} {size}" for size in sizes for which in ("measured,", "model,")))
    yield rule(1 + 2 * len(sizes))
    for index, work in enumerate(EFFICIENCIES):
        cells = []
        for size in sizes:
            model = work / (work + walls["star"].seconds(size, 4 * SIDES[1] ** 2))
            cells += [f"{efficiencies[size][index]:.0%}", f"{model:.0%}"]
        yield row(f"{work:g} s", *cells)
    yield from ["", "## What it says of more workers", ""]
    ways = ("star", "tree", "mirror")
    yield row("workers", *(cell for way in ways for cell in (f"{way}: beyond the work", "work for 90 %")))
    yield rule(7)
    for size in (64, 256, 1024):
        cells = []
        for way in ways:
            seconds = on_hosts(cpus["mirror" if way == "mirror" else "star"], way, size)
            cells += [f"{seconds:.2f} s", f"{9 * seconds:.1f} s"]
        yield row(f"{size:,}", *cells)
    yield from ["", "## A tree of 1,024 in which workers die", ""]
    yield row("workers that die", "calls that fail for each", "the first tree", "the next")
    yield rule(4)
    for dying in (1, 4, 16, 64):
        failing, first, following = with_failures(1024, dying)
        yield row(str(dying), f"{failing:.1f}", f"{first:.3f} s", f"{following:.3f} s")
    seconds = arrival(grown(1024, FAN_OUT), MODEL)[0]
    yield ""
    yield f"Without a loss the tree takes {seconds:.3f} s, and one message after another {1023 * MODEL / LINE:.1f} s."


def costs(measured: dict[int, Figures], which: int, sizes: tuple[int, ...] = FITTED) -> dict[str, Cost]:
    """A fit for each way; ``which`` of the figures."""
    points: dict[str, dict[tuple[int, int], float]] = {}
    for size in sizes:
        for (way, nbytes), figures in measured[size].items():
            points.setdefault(way, {})[size, nbytes] = figures[which]
    return {way: Cost.fit(found) for way, found in points.items()}


def fit_table(measured: dict[int, Figures], walls: dict[str, Cost], cpus: dict[str, Cost]) -> Iterator[str]:
    """What was fitted, and how well it fits."""

    def worst(way: str, sizes: tuple[int, ...]) -> float:
        return max(
            abs(walls[way].seconds(size, nbytes) - figures[0]) / (WORK + figures[0])
            for size in sizes
            for (name, nbytes), figures in measured[size].items()
            if name == way
        )

    names = {
        "star": "a step",
        "mirror": "a step with a mirror",
        "call": "a call",
        "raw rpc_async": "raw `rpc_async`",
    }
    yield from ["## The fit", ""]
    yield row(
        "", "once", "a MB", "a worker", "a worker and MB", "worst, fitted sizes", "worst, held-out sizes"
    )
    yield rule(7)
    for way, name in names.items():
        errors = f"{worst(way, FITTED):.0%}", f"{worst(way, HELD_OUT):.0%}"
        for what, cost in (("seconds", walls[way]), ("the caller's CPU", cpus[way])):
            parts = f"{cost.fixed * 1e3:.1f} ms", f"{cost.own * 1e9:.1f} ms", f"{cost.worker * 1e3:.2f} ms"
            yield row(
                f"{name}, {what}",
                *parts,
                f"{cost.byte * 1e9:.2f} ms",
                *(errors if what == "seconds" else ("", "")),
            )
    yield ""
    ratio = walls["call"].worker / max(walls["raw rpc_async"].worker, 1e-9)
    yield f"A worker costs {ratio:.1f} times the seconds of a raw `rpc_async`. Errors are parts of a whole step."
    yield ""
    columns = [(way, 4 * side**2) for way in WAYS for side in SIDES]
    yield row("workers", *(f"{way}, {nbytes / 1e6:.2g} MB" for way, nbytes in columns))
    yield rule(1 + len(columns))
    for size, figures in sorted(measured.items()):
        cells = [
            f"{figures[key][0] * 1e3:.0f} / {walls[key[0]].seconds(size, key[1]) * 1e3:.0f}"
            for key in columns
        ]
        yield row(f"{size}{'' if size in FITTED else ', held out'}", *cells)
    yield ""
    yield "Milliseconds of a step beyond its work, measured / by the model."


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    return "|---" * columns + "|"


def write(lines: list[str]) -> None:
    """Put the lines into the page, in the place of those of last time."""
    PAGE.write_text(with_output(PAGE.read_text("utf-8"), "scaling", "\n".join(lines), stamp()), "utf-8")


def measure_all() -> tuple[dict[int, Figures], dict[int, list[float]]]:
    """By the number of workers, the figures of the ways, and the efficiencies."""
    measured = {}
    for size in sorted(FITTED + HELD_OUT):
        measured[size] = World(size).on_zero(measure, timeout=250)
        print(f"# {size} workers", file=sys.stderr, flush=True)
    return measured, {size: World(size).on_zero(efficiency, timeout=250) for size in (2, 8, 32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the figures into docs/scaling.md")
    parser.add_argument("--again", action="store_true", help="measure nothing, take the figures of last time")
    args = parser.parse_args()
    if not args.again:
        MEASURED.parent.mkdir(exist_ok=True)
        MEASURED.write_text(repr(measure_all()))
    lines = [*report(*ast.literal_eval(MEASURED.read_text()))]
    print("\n".join(lines))
    if args.write:
        write(lines)


if __name__ == "__main__":
    main()
