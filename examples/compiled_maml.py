"""MAML, and the same MAML by programs of torch's compiler: one word, ``compile=True``.

    python examples/compiled_maml.py                    # compiles first
    python examples/compiled_maml.py --no-compile       # the same numbers without the compiler

The inner loop of a small network consists of hundreds of operations, and starting each takes longer than computing it.
Compiled, a worker's tasks, their inner steps and their gradients are a few kernels. Each of several workers compiles
for itself, at its first call. A meta-step of so small a network takes less time than a message to a second worker.

A task is a sine of some height and phase, as in ``maml_sinusoid.py``, with ten points to adapt to and ten to test on.
The picture shows the loss against time, with and without the compiler.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import torchopt_dist as todist

POINTS = 10
"""Known of each sine; as many others test what was learned of them."""


class Sines(NamedTuple):
    """Tasks, each of shape (2 * POINTS, 1)."""

    x: Tensor
    y: Tensor


def sines(tasks: int, generator: torch.Generator) -> Sines:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    x = uniform(-5, 5, tasks, 2 * POINTS, 1)
    return Sines(x, uniform(0.1, 5, tasks, 1, 1) * torch.sin(x - uniform(0, torch.pi, tasks, 1, 1)))


def task_loss(model: nn.Module, task: Sines, steps: int) -> Tensor:
    """The error on the last ten points of one sine, after some steps on the first ten."""
    adapted = todist.module_clone(model)
    inner = todist.MetaSGD(adapted, lr=0.01)
    for _ in range(steps):
        inner.step(F.mse_loss(adapted(task.x[:POINTS]), task.y[:POINTS]))
    return F.mse_loss(adapted(task.x[POINTS:]), task.y[POINTS:])


plain_loss = todist.parallelize(todist.tasks, todist.mean_reducer, vectorize=True)(task_loss)
compiled_loss = todist.parallelize(todist.tasks, todist.mean_reducer, vectorize=True, compile=True)(task_loss)


def train(compile: bool, args: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """The loss of each step, the seconds until then, and those before the first."""
    mean_loss = compiled_loss if compile else plain_loss
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = todist.Adam(model.parameters(), lr=0.01)
    start = time.perf_counter()
    mean_loss(model, sines(args.tasks, torch.Generator().manual_seed(9)), args.inner_steps).backward()
    before = time.perf_counter() - start
    losses, seconds = [], []
    start = time.perf_counter()
    for _ in range(args.meta_steps):
        loss: Tensor = mean_loss(model, sines(args.tasks, generator), args.inner_steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return losses, seconds, before


@todist.rank_zero_only
def run(args: argparse.Namespace) -> None:
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for compile in (False, True) if args.compile else (False,):
        name = "compiled" if compile else "not compiled"
        losses, seconds, before = train(compile, args)
        last = losses[-10:]
        print(
            f"{name:12s} loss {losses[0]:.2f} -> {sum(last) / len(last):.2f}; "
            f"{1e3 * seconds[-1] / len(seconds):.2f} ms a step, {before:.1f} s before the first"
        )
        width = max(1, len(losses) // 20)
        smooth = torch.tensor(losses).unfold(0, width, 1).mean(dim=1).tolist()
        axes.plot(seconds[width - 1 :], smooth, label=name)
    axes.set(xlabel="seconds, without compiling", ylabel="loss after adaptation", xscale="log")
    axes.set_title(f"{args.meta_steps} meta-steps of {args.tasks} tasks")
    axes.legend()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(f"picture: {args.output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="MAML on sines, with and without the compiler.")
    parser.add_argument("--meta-steps", type=int, default=300, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner-steps", type=int, default=5, help="of SGD (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=16, help="a meta-step (default: %(default)s)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train with the compiler, too (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/compiled_maml.png"), help="picture to draw"
    )
    return parser.parse_args()


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    run(parse_arguments())


if __name__ == "__main__":
    main()
