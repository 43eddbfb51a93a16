"""The figure of the MAML paper: a network that fits any sine after a step or two, and one that does not.

    python examples/maml_sinusoid.py
    torchrun --nproc_per_node=2 examples/maml_sinusoid.py

A task is a sine of some height and phase, of which ten points are known (Finn et al., 2017, section 5.1,
https://arxiv.org/abs/1703.03400). The baseline is trained in the ordinary way on as many sines, and adapted in the same
way. Because it is trained on all sines together, it learns their mean, from which a few steps lead nowhere.

The picture shows both on a sine that is new to them, after 0, 1 and 10 steps, and the mean error on 100 others. The
tasks of a meta-step are spread over the workers, and each worker computes all its tasks at once (``vectorize=True``).
On one worker or on many, the numbers printed are the same up to rounding. The network is too small for a second worker
to pay.

    error on 100 new sines, after steps    0       1       2       5       10
    MAML                                   2.83    0.87    0.51    0.30    0.23
    ordinary training                      2.84    2.44    2.19    1.92    1.69
"""

from __future__ import annotations

import argparse
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


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def adapt(model: nn.Module, x: Tensor, y: Tensor, lr: float, steps: int) -> nn.Module:
    """A copy of the model after some steps on known points."""
    adapted = todist.module_clone(model)
    inner = todist.MetaSGD(adapted, lr=lr)
    for _ in range(steps):
        inner.step(lambda: F.mse_loss(adapted(x), y))
    return adapted


@todist.parallelize(todist.tasks, todist.mean_reducer, vectorize=True)
def adapted_loss(model: nn.Module, task: Sines, lr: float, steps: int) -> Tensor:
    """The error on the other points of one sine, after steps on the known ones."""
    adapted = adapt(model, task.x[:POINTS], task.y[:POINTS], lr, steps)
    return F.mse_loss(adapted(task.x[POINTS:]), task.y[POINTS:])


@todist.rank_zero_only
def train(args: argparse.Namespace, write: todist.typing.WriteScalars) -> None:
    models = {}
    for name, inner_steps in (("MAML", args.inner_steps), ("ordinary training", 0)):
        torch.manual_seed(args.seed)
        generator = torch.Generator().manual_seed(args.seed)
        model = models[name] = network()
        optimizer = todist.Adam(model.parameters(), lr=2e-3)
        for step in range(args.meta_steps):
            loss: Tensor = adapted_loss(model, sines(args.tasks, generator), args.inner_lr, inner_steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            write(step, {f"loss/{name}": loss})

    held_out = sines(100, torch.Generator().manual_seed(args.seed + 1))
    steps = (0, 1, 2, 5, 10)
    errors = {}
    for name, model in models.items():
        with torch.no_grad():
            errors[name] = [adapted_loss(model, held_out, args.inner_lr, count).item() for count in steps]
        printed = ", ".join(f"{count}: {error:.2f}" for count, error in zip(steps, errors[name], strict=True))
        print(f"{name:18s} error after steps {printed}")
    draw(models, errors, steps, held_out, args)


def draw(
    models: dict[str, nn.Sequential],
    errors: dict[str, list[float]],
    steps: tuple[int, ...],
    held_out: Sines,
    args: argparse.Namespace,
) -> None:
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    *curves, summary = figure.subplots(1, 3)
    height = held_out.y.amax(dim=(1, 2))
    x, y = (part[int((height - 3.5).abs().argmin())] for part in held_out)
    order = x[:, 0].argsort()
    line = torch.linspace(-5, 5, 200)[:, None]
    for axes, (name, model) in zip(curves, models.items(), strict=True):
        axes.plot(
            x[order].numpy(), y[order].numpy(), color="0.8", linewidth=4, label="the sine, at 20 points"
        )
        axes.plot(x[:POINTS].numpy(), y[:POINTS].numpy(), "k^", label="the ten that are known")
        for count, style in ((0, ":"), (1, "--"), (10, "-")):
            adapted = adapt(model, x[:POINTS], y[:POINTS], args.inner_lr, count)
            prediction = adapted(line).detach().numpy()
            axes.plot(
                line.numpy(),
                prediction,
                "C0" if name == "MAML" else "C1",
                linestyle=style,
                label=f"{count} steps",
            )
        axes.set(title=name, ylim=(-5.5, 5.5))
    curves[0].legend(fontsize=7)
    for name, values in errors.items():
        summary.plot(steps, values, "o-", label=name)
    summary.set(
        xlabel="steps on ten points", ylabel="mean squared error", title="100 new sines", ylim=(0, None)
    )
    summary.legend()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(f"picture: {args.output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="MAML on sines, beside ordinary training.")
    parser.add_argument("--meta-steps", type=int, default=1500, help="of either (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=25, help="sines a step (default: %(default)s)")
    parser.add_argument(
        "--inner-steps", type=int, default=3, help="of MAML in training (default: %(default)s)"
    )
    parser.add_argument("--inner-lr", type=float, default=0.01, help="of SGD (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/maml_sinusoid.png"), help="picture to draw"
    )
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write the curves there, too")
    return parser.parse_args()


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    args = parse_arguments()
    with todist.scalar_writer(args.tensorboard) as write:
        train(args, write)


if __name__ == "__main__":
    main()
