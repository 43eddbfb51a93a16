"""Calls and steps for minutes, while workers are killed: nothing is lost, nothing counts twice, and memory stays level.

    python benchmarks/soak.py
    python benchmarks/soak.py --calls 2000 --steps 120 --every 1
    python benchmarks/soak.py --replace

Training with ``retries`` runs in worlds of some workers, one of which is killed every few seconds. When two are left,
the next world goes on from the parameters of the last one; with ``--replace`` each gets a new process, and one world
goes through to the end. The parameters at the end are compared with those of a
training without kills, bit for bit; small calls, each of which returns its own number, with what they must return.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist

MEGABYTE = 1e6


class Progress(NamedTuple):
    """How far a soak is, which the next world takes up."""

    done: int
    state: dict[str, Any]
    seconds: float
    kills: int
    memory: list[int]
    """Of rank 0, in bytes, a tenth of the work apart."""
    wrong: int


class Killer:
    """Kills a worker every few seconds, as long as more than two are left.

    Args:
        every: seconds; 0 kills none.
        seed: which of them.
        replace: whether a worker that is killed gets a new process.
    """

    def __init__(self, every: float, seed: int, replace: bool) -> None:
        self.kills = 0
        self._replace = replace
        self._processes = {worker.rank: worker.process for worker in todist.status() if worker.rank}
        self._random = random.Random(seed)
        self._every = every
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        if every:
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether no worker can be spared any more."""
        return bool(self._every) and not self._replace and len(todist.alive()) <= 2

    def stop(self) -> None:
        """Kill no more."""
        self._end.set()
        if self._every:
            self._thread.join()

    def _work(self) -> None:
        while not self._end.wait(self._every):
            left = [rank for rank in todist.alive() if rank]
            if self._replace:
                self._processes = {
                    worker.rank: worker.process for worker in todist.status() if worker.process
                }
                left = [rank for rank in left if rank in self._processes]
            if len(left) > 1:
                victim = self._random.choice(left)
                os.kill(self._processes[victim], signal.SIGKILL)
                self.kills += 1
                while victim in todist.alive() and not self._end.wait(0.01):
                    pass


def echo(number: int, x: Tensor) -> Tensor:
    """A small call's work."""
    return x * number


def small_calls(start: Progress, total: int, killer: Killer) -> Progress:
    """Calls that return their own number, on all workers in turn."""
    begun, memory, wrong, done = time.perf_counter(), list(start.memory), 0, start.done
    x = torch.ones(4)
    while done < total and not killer.is_done:
        ranks = todist.get_world_size()
        values = todist.map(echo, range(done, done + ranks), args=(x,), retries=2)
        wrong += sum(int(value[0]) != done + place for place, value in enumerate(values))
        if (done + ranks) * 10 // total > done * 10 // total:
            memory.append(todist.status()[0].memory)
        done += ranks
    seconds = start.seconds + time.perf_counter() - begun
    return Progress(done, {}, seconds, start.kills + killer.kills, memory, start.wrong + wrong)


def task_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss after two inner steps, with dropout."""
    model = todist.module_clone(model)
    inner = todist.MetaSGD(model, lr=0.1)
    for _ in range(2):
        inner.step(F.mse_loss(F.dropout(model(x), 0.1), y))
    return F.mse_loss(model(x), y)


def training(start: Progress, total: int, killer: Killer) -> Progress:
    """MAML on tasks that are drawn anew at each step."""
    begun, memory, done = time.perf_counter(), list(start.memory), start.done
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = todist.Adam(model.parameters(), lr=0.01)
    if start.state:
        model.load_state_dict(start.state["model"])
        optimizer.load_state_dict(start.state["optimizer"])
    loss_fn = todist.parallelize(todist.tasks, todist.mean_reducer, retries=2)(task_loss)
    while done < total and not killer.is_done:
        torch.manual_seed(done)  # of the tasks, and of their dropout
        x, y = torch.randn(12, 16, 4), torch.randn(12, 16, 1)
        optimizer.zero_grad()
        loss_fn(model, x, y).backward()
        optimizer.step()
        done += 1
        if done * 10 // total > (done - 1) * 10 // total:
            memory.append(todist.status()[0].memory)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    seconds = start.seconds + time.perf_counter() - begun
    return Progress(done, state, seconds, start.kills + killer.kills, memory, 0)


def in_a_world(
    work: Callable[[Progress, int, Killer], Progress],
    start: Progress,
    total: int,
    every: float,
    replace: bool,
) -> Progress | None:
    """On each worker: rank 0 works until all is done, or workers can be spared no more."""
    torch.set_num_threads(1)
    if todist.get_rank():
        return None
    killer = Killer(every, start.done, replace)
    try:
        return work(start, total, killer)
    finally:
        killer.stop()


def soak(
    work: Callable[[Progress, int, Killer], Progress],
    total: int,
    every: float,
    workers: int,
    replace: bool,
) -> Progress:
    """Work in one world after another until all is done."""
    progress = Progress(0, {}, 0.0, 0, [], 0)
    while progress.done < total:
        result = todist.launch(
            in_a_world,
            (work, progress, total, every, replace),
            nproc_per_host=workers,
            rpc=True,
            on_loss="replace" if replace else "continue",
            max_replacements=1_000_000,
            log_dir=None,
            env={"TORCH_CPP_LOG_LEVEL": "ERROR"},  # torch tells of each connection that ends
        )
        found = result.rank(0)
        assert found is not None
        progress = found
    return progress


def main() -> None:
    """Soak, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000, help="small ones, a task each")
    parser.add_argument("--steps", type=int, default=1000, help="of the training")
    parser.add_argument("--workers", type=int, default=4, help="in each world")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two kills")
    parser.add_argument("--replace", action="store_true", help="give each killed one a new process")
    arguments = parser.parse_args()
    logging.getLogger("torchopt_dist").setLevel(logging.ERROR)  # the kills are meant
    for name, work, total in (
        ("calls", small_calls, arguments.calls),
        ("steps", training, arguments.steps),
    ):
        calm = soak(work, total, 0.0, arguments.workers, arguments.replace)
        killed = soak(work, total, arguments.every, arguments.workers, arguments.replace)
        for progress, how in ((calm, "none killed"), (killed, f"{killed.kills} killed")):
            least, most = min(progress.memory) / MEGABYTE, max(progress.memory) / MEGABYTE
            print(
                f"{progress.done} {name}, {how}: {progress.seconds:.1f} s, {progress.wrong} wrong, "
                f"rank 0 has {least:.0f} to {most:.0f} MB"
            )
        print(f"kept of the throughput: {calm.seconds / killed.seconds:.1%}")
        if work is training:
            pairs = zip(calm.state["model"].values(), killed.state["model"].values(), strict=True)
            equal = all(torch.equal(one, other) for one, other in pairs)
            print(f"parameters are the same, bit for bit: {equal}")


if __name__ == "__main__":
    main()
