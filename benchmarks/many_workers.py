"""32 workers on this machine: memory of each, calls a second, and whether anything is kept at the end.

    python benchmarks/many_workers.py [--workers 32] [--seconds 10] [--transport zmq]

A call goes to all workers, with a model of 1 MB, forward and backward; then empty calls to one after another.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import torchopt_dist as todist

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.processes import World


@todist.parallelize(todist.tasks, todist.mean_reducer)
def task_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def nothing() -> None:
    pass


def measure(seconds: float) -> list[str]:
    """The rows of the table."""
    size = todist.get_world_size()
    model = nn.Linear(512, 512, bias=False)
    x = torch.ones(size, 4, 512)

    def rate(step: Callable[[], object]) -> float:
        step()
        calls, ends = 0, time.monotonic() + seconds
        started = time.monotonic()
        while time.monotonic() < ends:
            step()
            calls += 1
        return calls / (time.monotonic() - started)

    steps = rate(lambda: task_loss(model, x).backward())
    targets = iter(range(10**9))
    small = rate(lambda: todist.remote_call(nothing, 1 + next(targets) % (size - 1)))
    deadline = time.monotonic() + 10
    while any(worker.kept_graphs for worker in todist.status()) and time.monotonic() < deadline:
        pass  # the requests to forget them are on their way
    found = todist.status()
    memory = [worker.memory for worker in found[1:]]
    return [
        "| workers | a worker has | the caller | steps a second | empty calls a second | graphs kept at the end |",
        "|---|---|---|---|---|---|",
        f"| {size} | {statistics.median(memory) / 2**20:.0f} MiB | {found[0].memory / 2**20:.0f} MiB | {steps:.1f}, of "
        f"{2 * (size - 1)} requests each | {small:,.0f} | {sum(worker.kept_graphs for worker in found)} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="of each rate (default: %(default)s)")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="rpc", help="(default: %(default)s)")
    args = parser.parse_args()
    print(
        "\n".join(World(args.workers).on_zero(measure, args.seconds, transport=args.transport, timeout=250))
    )


if __name__ == "__main__":
    main()
