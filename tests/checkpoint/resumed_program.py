"""A training on all workers of a world that is killed on demand, and goes on from its checkpoints.

``resumed_program.py FOLDER KILL``: as ``train(FOLDER, KILL)``, and the parameters in ``FOLDER/result``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch

import torchopt_dist as todist

STEPS, EVERY = 12, 3


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def loss_of(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).pow(2).mean()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@todist.rank_zero_only
def train(folder: Path, kill: int | None) -> tuple[list[float], list[int]]:
    """The parameters after all steps, and the steps that this world has made.

    Args:
        folder: of the checkpoints.
        kill: the rank that is killed in the first world, at step 8.
    """
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = todist.Adam(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
    made = []
    checkpointer = todist.Checkpointer(folder, every=EVERY, background=True)
    start, state = checkpointer.restore({"net": net, "optimizer": optimizer, "scheduler": scheduler})
    for step in range(start + 1, STEPS + 1):
        x = torch.randn(5, 3) + random.random() + float(np.random.rand())
        if kill is not None and step == 8 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            checkpointer.wait()
            todist.remote_sync_call(die, partitioner=kill)
        optimizer.zero_grad()
        loss_of(net, x).backward()
        optimizer.step()
        scheduler.step()
        made.append(step)
        checkpointer.save(step, state)
    checkpointer.close()
    return [value for p in net.parameters() for value in p.flatten().tolist()], made


if __name__ == "__main__":

    @todist.auto_init_rpc()
    def main() -> None:
        result = train(Path(sys.argv[1]), int(sys.argv[2]))
        if result is not None:
            Path(sys.argv[1], "result").write_text(json.dumps(result))

    main()
