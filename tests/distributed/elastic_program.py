"""A program for torchrun that tells which worlds it has seen, loses ranks on demand, and ends when told to.

``elastic_program.py FOLDER [KILL ...]``: rank 0 of each world makes a file ``world.<n>``, n from 0, with the processes
of the world and a gradient computed on all of them. The n-th KILL is the rank that is killed in the n-th world. When
there is none left, the program ends as soon as there is a file ``end``, and leaves ``result``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import torchopt_dist as todist
from tests.waits import say


def losses(x: torch.Tensor) -> torch.Tensor:
    return x.pow(3).sum()


def place() -> tuple[int, int]:
    return os.getpid(), int(os.environ["GROUP_RANK"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def gradient() -> list[float]:
    x = torch.arange(12.0, requires_grad=True)
    parallel = todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.sum_reducer)
    parallel(losses)(x).backward()
    return x.grad.tolist()


@todist.auto_init_rpc()
@todist.rank_zero_only
def main(folder: Path, kills: list[int]) -> None:
    number = len(list(folder.glob("world.?")))
    ranks = range(todist.get_world_size())
    places = [todist.remote_sync_call(place, partitioner=rank)[0] for rank in ranks]
    say(folder / f"world.{number}", json.dumps({"places": places, "gradient": gradient()}))
    if number < len(kills):
        todist.remote_sync_call(die, partitioner=kills[number])
    while not (folder / "end").exists():
        for rank in ranks:
            todist.remote_sync_call(place, partitioner=rank)
        time.sleep(0.01)
    say(folder / "result", json.dumps({"places": places, "gradient": gradient()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(rank) for rank in sys.argv[2:]])
