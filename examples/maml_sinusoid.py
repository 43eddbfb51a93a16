"""A network that fits any sine after a step or two, and one that does not: the first experiment of the MAML paper.

    python examples/maml_sinusoid.py
    torchrun --nproc_per_node=2 examples/maml_sinusoid.py

A task is a sine of some height and phase, of which five or ten points are known (Finn et al., 2017, section 5.1,
https://arxiv.org/abs/1703.03400). MAML learns initial weights from which one step of gradient descent on ten points
leads as far as it can. Pre-training is ordinary training on as many sines, adapted in the same way; it learns the mean
of all sines, from which a few steps lead nowhere. The oracle is told height and phase. As in the paper, MAML is trained
with one step of rate 0.01 on ten points; here for 2,400 meta-steps instead of 70,000, with a rate that falls to zero.

Claim (Figure 3): the error of MAML falls far below that of pre-training at the first step, and goes on falling without
overfitting five points. The paper shows curves; Li et al. print numbers (2017, Table 1,
https://arxiv.org/abs/1707.09835). Each learner is trained from two seeds, and each network tested on half of the new
sines. The trainings are spread over the workers; a worker computes all sines of a meta-step at once.

Result: on 600 new sines, MAML is at 1.01 and 0.67 after one step on five and ten points, and at 0.56 and 0.25 after ten
steps; pre-training at 2.63 and 2.38, and at 2.51 and 1.65. The oracle is at 0.02.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import torchopt_dist as todist

POINTS = 10
"""Known of each sine at most; as many others test what was learned of them."""
STEPS = (0, 1, 5, 10)
PAPER = {
    ("MAML", 5): "1.17 ± 0.16 †",
    ("MAML", 10): "0.77 ± 0.11 †",
    ("pre-training", 5): "far above MAML",
    ("pre-training", 10): "far above MAML",
    ("oracle", 0): "near 0, without a step",
}
"""After one step: Table 1 of Li et al. († is not checked), and what Figure 3 of the paper shows."""


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


def adapted_losses(model: nn.Module, tasks: Sines, known: int, lr: float, steps: int) -> Tensor:
    """The error on the other points of each sine, after steps on the known ones; of all sines at once."""

    def adapted_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(adapt(model, x[:known], y[:known], lr, steps)(x[POINTS:]), y[POINTS:])

    losses: Tensor = torch.vmap(adapted_loss)(*tasks)
    return losses


class Run(NamedTuple):
    learner: str
    seed: int


class Found(NamedTuple):
    losses: Tensor  # of each meta-step
    weights: dict[str, Tensor]
    errors: dict[tuple[int, int], Tensor]  # known points, steps → the error of each new sine


def train(run: Run, args: argparse.Namespace) -> Found:
    """On some worker: meta-training with one inner step, or ordinary training, which has none; then the test."""
    torch.manual_seed(run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    oracle, inner_steps = run.learner == "oracle", int(run.learner == "MAML")
    model = network(3 if oracle else 1)
    optimizer = todist.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.meta_steps)
    losses = []
    for _ in range(args.meta_steps):
        batch = sines(args.tasks, generator, oracle)
        loss = adapted_losses(model, batch, POINTS, args.inner_lr, inner_steps).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    new = sines(args.test_tasks // args.seeds, torch.Generator().manual_seed(1000 + run.seed), oracle)
    tests = [(0, 0)] if oracle else [(known, steps) for known in (5, 10) for steps in STEPS]
    with torch.no_grad():
        errors = {test: adapted_losses(model, new, test[0], args.inner_lr, test[1]) for test in tests}
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return Found(torch.stack(losses), weights, errors)


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    seeds = range(args.seed, args.seed + args.seeds)
    runs = [Run(learner, seed) for seed in seeds for learner in ("MAML", "pre-training", "oracle")]
    found = dict(zip(runs, todist.map(train, runs, args=(args,)), strict=True))
    print("| learner | known points | paper, after 1 step | after 0 | after 1 | after 5 | after 10 |")
    print("|---|---|---|---|---|---|---|")
    models: dict[str, nn.Module] = {}
    errors: dict[Any, Any] = {}
    for (name, known), claim in PAPER.items():
        of_seeds = [found[Run(name, seed)] for seed in seeds]
        models[name] = network(3 if name == "oracle" else 1)
        models[name].load_state_dict(of_seeds[0].weights)
        cells = ["", "", "", ""]
        for place, steps in enumerate(STEPS if known else (0,)):
            error = torch.cat([each.errors[known, steps] for each in of_seeds])
            half = 1.96 * error.std() / len(error) ** 0.5
            errors[name, known, steps] = float(error.mean()), float(half)
            cells[place] = f"{error.mean():.2f} ± {half:.2f}"
        print(f"| {name} | {known or ''} | {claim} | {' | '.join(cells)} |")
    with todist.scalar_writer(args.tensorboard) as write:
        for run, (losses, _, _) in found.items():
            for step, loss in enumerate(losses):
                write(step, {f"loss/{run.learner}, seed {run.seed}": loss})
    draw(models, errors, args)


def draw(models: dict[str, nn.Module], errors: dict[Any, Any], args: argparse.Namespace) -> None:
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    *curves, summary = figure.subplots(1, 3)
    held_out = sines(100, torch.Generator().manual_seed(args.seed + 2))
    x, y = (part[int((held_out.y.amax(dim=(1, 2)) - 3.5).abs().argmin())] for part in held_out)
    order, line = x[:, 0].argsort(), torch.linspace(-5, 5, 200, dtype=torch.float64)[:, None]
    for axes, name, colour in zip(curves, ("MAML", "pre-training"), ("C0", "C1"), strict=True):
        axes.plot(x[order], y[order], "0.8", linewidth=4, label="the sine, at 20 points")
        axes.plot(x[:POINTS], y[:POINTS], "k^", label="the ten that are known")
        for count, style in ((0, ":"), (1, "--"), (10, "-")):
            adapted = adapt(models[name], x[:POINTS], y[:POINTS], args.inner_lr, count)
            axes.plot(line, adapted(line).detach(), colour, linestyle=style, label=f"{count} steps")
        axes.set(title=name, ylim=(-8, 5.5))
    curves[0].legend(fontsize=7, ncols=2, loc="lower center")
    for name, colour in (("MAML", "C0"), ("pre-training", "C1")):
        for known, style in ((5, "--"), (10, "-")):
            means, halves = zip(*(errors[name, known, steps] for steps in STEPS), strict=True)
            line_style = f"{colour}o{style}"
            summary.errorbar(STEPS, means, halves, fmt=line_style, capsize=2, label=f"{name}, {known} points")
    summary.axhline(errors["oracle", 0, 0][0], color="0.5", linestyle=":", label="oracle")
    summary.set(xlabel="steps", ylabel="mean squared error", title=f"{args.test_tasks} new sines")
    summary.set_ylim(0, 1.5 * errors["pre-training", 5, 0][0])
    summary.legend(fontsize=7, ncols=2, loc="upper right")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(f"picture: {args.output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="MAML on sines, beside pre-training and an oracle.")
    parser.add_argument("--meta-steps", type=int, default=2400, help="of each (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=25, help="sines a step (default: %(default)s)")
    parser.add_argument("--test-tasks", type=int, default=600, help="new sines (default: %(default)s)")
    parser.add_argument("--inner-lr", type=float, default=0.01, help="of SGD (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="of Adam (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/maml_sinusoid.png"), help="picture")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write the curves there, too")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_arguments())
