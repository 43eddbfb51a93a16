"""How long is a step where one worker is slower? Even shares, and shares by measured speed, in turn in one run.

Tasks sleep, so that workers run at the same time on however few cores; on the last worker they sleep longer.

    python benchmarks/balance.py [--workers 4] [--tasks 32] [--slower 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from workers import start_workers

import torchopt_dist as todist

WORK = 0.01
"""Seconds of a task on all workers but the last."""
ROUNDS = 10


def task_loss(model: nn.Module, x: Tensor, slower: Tensor) -> Tensor:
    last = todist.get_rank() == todist.get_world_size() - 1
    time.sleep(WORK * (float(slower) if last else 1.0))
    return model(x).square().mean()


def seconds_of(step: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    step().backward()
    return time.perf_counter() - started


@todist.rank_zero_only
def measure(tasks: int, slower: float) -> None:
    size = todist.get_world_size()
    model, x, times = nn.Linear(256, 256), torch.randn(tasks, 16, 256), torch.tensor(slower)
    balance = todist.Balance()
    partitioners = {
        "even": todist.tasks,
        "by speed": todist.dim_partitioner(0, exclusive=True, keepdim=False, balance=balance),
    }
    steps = {
        name: todist.parallelize(partitioner, todist.mean_reducer)(task_loss)
        for name, partitioner in partitioners.items()
    }
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 2):
        for name, step in steps.items():
            seconds = seconds_of(partial(step, model, x, times))
            if turn > 1:
                found[name].append(seconds)
    speeds = [1.0] * (size - 1) + [1 / slower]
    sleep = {
        "even": WORK * slower * (tasks // size),
        "by speed": WORK * tasks / sum(speeds),
    }
    print(
        f"{size} workers, {tasks} tasks of {1e3 * WORK:g} ms, {slower:g} times as long on the last worker:\n"
    )
    print("| shares | a step | of it work, by the speeds | tasks |\n|---|---|---|---|")
    for name, seconds in found.items():
        shares = [tasks // size] * size if name == "even" else balance.shares(tasks, range(size))
        listed = ", ".join(map(str, shares))
        print(
            f"| {name} | {1e3 * statistics.median(seconds):.0f} ms | {1e3 * sleep[name]:.0f} ms | {listed} |"
        )
    even, other = (statistics.median(seconds) for seconds in found.values())
    print(f"\nShares by speed take {other / even:.2f} of the time of even ones.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--slower", type=float, default=3.0, help="(default: %(default)s)")
    args = parser.parse_args()
    start_workers(args.workers)
    program = todist.auto_init_rpc(lambda: torch.set_num_threads(1), transport="zmq")(measure)
    program(args.tasks, args.slower)


if __name__ == "__main__":
    main()
