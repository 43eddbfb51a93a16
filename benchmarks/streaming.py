"""How long is a call whose tasks travel over a slow network? Whole shares, and ``stream=True``, in turn in one run.

Three hosts as in ``network.py``, with 200 Mbit/s each. Rank 0 sends four tasks of 4 MB to each of the two others, where
a task sleeps, so that the hosts run at the same time on however few cores.

    sudo python benchmarks/streaming.py [--mbit 200] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from network import run_on_hosts
from torch import Tensor

import torchopt_dist as todist

TASKS, NUMBERS = 4, 2**20  # a worker's, and a task's
WORK = (0.0, 0.05, 0.16, 0.32, 0.64)
"""Seconds of a task."""


def task_loss(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x[:8].square().mean()


@todist.rank_zero_only
def measure(mbit: float, rounds: int) -> None:
    workers = list(range(1, todist.get_world_size()))
    partitioner = todist.dim_partitioner(0, exclusive=True, keepdim=False, workers=workers)
    x = torch.randn(TASKS * len(workers), NUMBERS)
    ways = {
        "whole": todist.parallelize(partitioner, todist.mean_reducer)(task_loss),
        "streamed": todist.parallelize(partitioner, todist.mean_reducer, stream=True)(task_loss),
    }
    wanted = x[:, :8].square().mean()
    sending = x.nbytes * 8 / (mbit * 1e6)  # one line for all workers
    print(
        f"{TASKS} tasks of {x[0].nbytes:,} bytes for each of {len(workers)} workers: {sending:.2f} s to send\n"
    )
    print("| a task runs for | whole | streamed | whole / streamed | by the bounds |\n|---|---|---|---|---|")
    for seconds in WORK:
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, call in ways.items():
                started = time.perf_counter()
                torch.testing.assert_close(call(x, seconds), wanted)
                if turn > 0:
                    found[name].append(time.perf_counter() - started)
        whole, streamed = (statistics.median(values) for values in found.values())
        running = TASKS * seconds
        bound = max(sending, running) + min(sending, running) / TASKS
        print(
            f"| {seconds:g} s | {whole:.2f} s | {streamed:.2f} s | {whole / streamed:.2f} | "
            f"{(sending + running) / bound:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=200, help="Mbit/s of a host (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first (default: %(default)s)")
    args = parser.parse_args()
    run_on_hosts(3, args.mbit, "zmq", measure, args.mbit, args.rounds)


if __name__ == "__main__":
    main()
