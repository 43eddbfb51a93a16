"""A network that fits any sine after a step or two, and one that does not: the first experiment of the MAML paper.

    python examples/maml_sinusoid.py
    torchrun --nproc_per_node=2 examples/maml_sinusoid.py

A task is a sine of some height and phase, of which five or ten points are known (Finn et al., 2017, section 5.1,
https://arxiv.org/abs/1703.03400). MAML learns initial weights from which one step of gradient descent on ten points
leads as far as it can. Pre-training is ordinary training on as many sines, adapted in the same way; it learns the mean
of all sines, from which a few steps lead nowhere. The oracle is told height and phase. As in the paper, MAML is trained
with one step of rate 0.01 on ten points; here for 2,000 meta-steps instead of 70,000, with a rate that falls to zero.

Claim (Figure 3): the error of MAML falls far below that of pre-training at the first step, and goes on falling without
overfitting five points. The paper shows curves; its numbers after one step were printed by Li et al. (2017, Table 1,
https://arxiv.org/abs/1707.09835). The sines of a meta-step are spread over the workers, and each worker computes all of
its sines at once; the network is too small for a second worker to pay.

Result: on 600 new sines, MAML is at 1.18 and 0.83 after one step on five and ten points, and at 0.65 and 0.31 after ten
steps; pre-training at 2.86 and 2.54, and at 2.79 and 1.72. The oracle is at 0.03.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import torchopt_dist as todist

POINTS = 10
"""Known of each sine at most; as many others test what was learned of them."""
STEPS = (0, 1, 5, 10)
PAPER = {
    ("MAML", 5): "1.17 ± 0.16",
    ("MAML", 10): "0.77 ± 0.11",
    ("pre-training", 5): "far above MAML",
    ("pre-training", 10): "far above MAML",
    ("oracle", 0): "near 0, without a step",
}
"""After one step: Table 1 of Li et al. (trained with ten points), and what Figure 3 of the paper shows."""


class Sines(NamedTuple):
    """Tasks, each of shape (2 * POINTS, 1); the x of an oracle have shape (2 * POINTS, 3)."""

    x: Tensor
    y: Tensor


def sines(tasks: int, generator: torch.Generator, oracle: bool = False) -> Sines:
    """Random sines; for an oracle, height and phase are told beside each x."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    x = uniform(-5, 5, tasks, 2 * POINTS, 1)
    height, phase = uniform(0.1, 5, tasks, 1, 1), uniform(0, math.pi, tasks, 1, 1)
    y = height * torch.sin(x - phase)
    return Sines(torch.cat([x, height.expand_as(x), phase.expand_as(x)], dim=-1) if oracle else x, y)


def network(inputs: int) -> nn.Sequential:
    """Two hidden layers of 40 units."""
    layers = nn.Linear(inputs, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
    return nn.Sequential(*layers).double()


def adapt(model: nn.Module, x: Tensor, y: Tensor, lr: float, steps: int) -> nn.Module:
    """A copy of the model after some steps on known points."""
    adapted = todist.module_clone(model)
    inner = todist.MetaSGD(adapted, lr=lr)
    for _ in range(steps):
        inner.step(lambda: F.mse_loss(adapted(x), y))
    return adapted


@todist.parallelize(todist.tasks, todist.stack_reducer, vectorize=True)
def adapted_loss(model: nn.Module, task: Sines, known: int, lr: float, steps: int) -> Tensor:
    """The error on the other points of one sine, after steps on the known ones."""
    adapted = adapt(model, task.x[:known], task.y[:known], lr, steps)
    return F.mse_loss(adapted(task.x[POINTS:]), task.y[POINTS:])


def train(name: str, args: argparse.Namespace, write: todist.typing.WriteScalars) -> nn.Module:
    """Meta-training with one inner step, or ordinary training, which has none; of an oracle, too."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = network(3 if name == "oracle" else 1)
    inner_steps = args.inner_steps if name == "MAML" else 0
    optimizer = todist.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.meta_steps)
    for step in range(args.meta_steps):
        batch = sines(args.tasks, generator, oracle=name == "oracle")
        loss = adapted_loss(model, batch, POINTS, args.inner_lr, inner_steps).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        write(step, {f"loss/{name}": loss})
    return model


@todist.rank_zero_only
def reproduce(args: argparse.Namespace, write: todist.typing.WriteScalars) -> None:
    print(
        "| learner | known points | paper, after 1 step | " + " | ".join(f"after {n}" for n in STEPS) + " |"
    )
    print("|---|" + "---|" * (2 + len(STEPS)))
    models, errors = {}, {}
    for name in ("MAML", "pre-training", "oracle"):
        model = models[name] = train(name, args, write)
        held_out = sines(args.test_tasks, torch.Generator().manual_seed(args.seed + 1), name == "oracle")
        for known in (0,) if name == "oracle" else (5, 10):
            cells = []
            for steps in STEPS if known else (0,):
                with torch.no_grad():
                    error: Tensor = adapted_loss(model, held_out, known, args.inner_lr, steps)
                half = 1.96 * error.std() / len(error) ** 0.5
                errors[name, known, steps] = float(error.mean()), float(half)
                cells.append(f"{error.mean():.2f} ± {half:.2f}")
            cells += [""] * (len(STEPS) - len(cells))
            print(f"| {name} | {known or ''} | {PAPER[name, known]} | {' | '.join(cells)} |", flush=True)
    draw(models, errors, args)


def draw(
    models: dict[str, nn.Module],
    errors: dict[tuple[str, int, int], tuple[float, float]],
    args: argparse.Namespace,
) -> None:
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    *curves, summary = figure.subplots(1, 3)
    held_out = sines(100, torch.Generator().manual_seed(args.seed + 2))
    x, y = (part[int((held_out.y.amax(dim=(1, 2)) - 3.5).abs().argmin())] for part in held_out)
    order = x[:, 0].argsort()
    line = torch.linspace(-5, 5, 200, dtype=torch.float64)[:, None]
    for axes, name in zip(curves, ("MAML", "pre-training"), strict=True):
        axes.plot(x[order].numpy(), y[order].numpy(), "0.8", linewidth=4, label="the sine, at 20 points")
        axes.plot(x[:POINTS].numpy(), y[:POINTS].numpy(), "k^", label="the ten that are known")
        for count, style in ((0, ":"), (1, "--"), (10, "-")):
            adapted = adapt(models[name], x[:POINTS], y[:POINTS], args.inner_lr, count)
            colour = "C0" if name == "MAML" else "C1"
            prediction = adapted(line).detach().numpy()
            axes.plot(line.numpy(), prediction, colour, linestyle=style, label=f"{count} steps")
        axes.set(title=name, ylim=(-5.5, 5.5))
    curves[0].legend(fontsize=7)
    for name, colour in (("MAML", "C0"), ("pre-training", "C1")):
        for known, style in ((5, "--"), (10, "-")):
            means, halves = zip(*(errors[name, known, steps] for steps in STEPS), strict=True)
            line_style = {"fmt": "o", "linestyle": style, "color": colour, "capsize": 2}
            summary.errorbar(STEPS, means, halves, label=f"{name}, {known} points", **line_style)
    summary.axhline(errors["oracle", 0, 0][0], color="0.5", linestyle=":", label="oracle")
    summary.set(xlabel="steps", ylabel="mean squared error", title=f"{args.test_tasks} new sines")
    summary.set_ylim(0, 1.5 * errors["pre-training", 5, 0][0])
    summary.legend(fontsize=7, ncols=2, loc="upper right")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(f"picture: {args.output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="MAML on sines, beside pre-training and an oracle.")
    parser.add_argument("--meta-steps", type=int, default=2000, help="of each (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=25, help="sines a step (default: %(default)s)")
    parser.add_argument("--test-tasks", type=int, default=600, help="new sines (default: %(default)s)")
    parser.add_argument("--inner-steps", type=int, default=1, help="of MAML in training (default: 1)")
    parser.add_argument("--inner-lr", type=float, default=0.01, help="of SGD (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="of Adam (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/maml_sinusoid.png"), help="picture")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write the curves there, too")
    return parser.parse_args()


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    args = parse_arguments()
    with todist.scalar_writer(args.tensorboard) as write:
        reproduce(args, write)


if __name__ == "__main__":
    main()
