"""How does the cost of a call grow with the number of workers? 1 to 32, with tasks that sleep, whatever the cores.

The peer is a raw ``rpc_async`` to each worker. The slope of a straight line through the points is the cost a worker.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from torch.distributed import rpc
from workers import interleaved

import torchopt_dist as todist

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.worlds import World

SLEEP = 0.05


def measure() -> tuple[float, float]:
    size = todist.get_world_size()

    def everybody() -> list[tuple[int, tuple[float], None]]:
        return [(rank, (SLEEP,), None) for rank in range(size)]

    def ours() -> None:
        todist.remote_sync_call(time.sleep, partitioner=everybody)

    def raw() -> None:
        futures = [rpc.rpc_async(f"worker{rank}", time.sleep, (SLEEP,)) for rank in range(1, size)]
        time.sleep(SLEEP)
        for future in futures:
            future.wait()

    seconds = interleaved({"ours": ours, "raw": raw}, rounds=9)
    return seconds["ours"] - SLEEP, seconds["raw"] - SLEEP


def main() -> None:
    sizes = [1, 2, 4, 8, 16, 32]
    rows, slopes = [], []
    print(f"{'workers':>8} {'ours, over the sleep':>21} {'raw rpc_async':>14}")
    for size in sizes:
        ours, raw = World(size).on_zero(measure, timeout=120)
        rows.append((ours, raw))
        print(f"{size:8} {ours * 1e3:18.2f} ms {raw * 1e3:11.2f} ms")
    for name, column in zip(("ours", "raw rpc_async"), zip(*rows, strict=True), strict=True):
        slope, offset = np.polyfit(sizes, column, 1)
        slopes.append(slope)
        residual = np.corrcoef(sizes, column)[0, 1] ** 2
        print(f"{name}: {slope * 1e6:.0f} us a worker + {offset * 1e3:.2f} ms, r2 = {residual:.3f}")
    print(f"ratio of the slopes: {slopes[0] / slopes[1]:.2f}")


if __name__ == "__main__":
    main()
