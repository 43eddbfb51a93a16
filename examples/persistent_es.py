"""Persistent evolution strategies, where short unrolls mislead truncated backpropagation.

    python examples/persistent_es.py
    torchrun --nproc_per_node=2 examples/persistent_es.py

A long inner loop is often cut into short unrolls, whose gradients ignore what came before, and so are biased.
Persistent evolution strategies (PES, Vicol et al., 2021, https://arxiv.org/abs/2112.13835) draw new noise for each
unroll, too, but weigh each loss with all the noise before it, so they are not. Two toy problems of the paper show it:

- *Influence balancing*: a linear system of 23 numbers, whose first one is to become 1. A larger parameter raises it at
  once, and lowers it more after a while. Truncated backpropagation goes the wrong way.
- *Toy regression*: a schedule of learning rates is learned for 100 steps over a bumpy surface. The way to the minimum
  is over a plateau, on which gradients point nowhere; PES sees beyond it, and by whole loops.

Each run is a task, and tasks are spread over the workers. A run seeds its own noise, and computes its pairs at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import torchopt_dist as todist

STEPS = 100  # of an inner loop
SIGNS = torch.tensor([1.0] * 10 + [-1.0] * 13)  # whether the parameter of influence balancing raises a number
MIX = 0.5 * torch.eye(23) + 0.5 * torch.diag(torch.ones(22), 1)


class Problem(NamedTuple):
    start: Tensor
    theta: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Tensor], todist.transform.GradientTransformation]
    skip: int  # first losses, which do not count
    lr: float


def transition(theta: Tensor, x: Tensor) -> Tensor:
    """A step of influence balancing: each number becomes the mean of it and the next one, and is pushed."""
    return MIX @ x + theta * SIGNS


def system(theta: Tensor) -> todist.transform.GradientTransformation:
    """A system as an optimizer that does not look at gradients."""

    def update(updates: Any, state: Any, *, params: Any = None, inplace: bool = False) -> tuple[Any, Any]:
        return transition(theta, params) - params, state

    return todist.transform.GradientTransformation(lambda params: todist.transform.EmptyState(), update)


def distance(theta: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (transition(theta, x)[0] - 1).square()


def valley(theta: Tensor, x: Tensor) -> Tensor:
    """The loss of the toy regression: a long way along the second axis, over bumps."""
    across, along = x.unbind()
    square = across.square()
    bumps = along.sin().square() * (-5 * square).exp()
    return (square + 5).sqrt() - 5**0.5 + bumps + 0.25 * (along - 100).abs()


def scheduled(theta: Tensor) -> todist.transform.GradientTransformation:
    """SGD whose learning rate goes from one to the other of two, whose logarithms are learned."""

    def rate(step: Any) -> Tensor:
        first, last = theta.exp().unbind()
        return torch.lerp(first, last, step.float() / 100)

    return todist.sgd(lr=rate)


INFLUENCE, TOY = "influence balancing", "toy regression"
PROBLEMS = {
    INFLUENCE: Problem(torch.ones(23), torch.tensor([0.5]), distance, system, 60, 0.03),
    TOY: Problem(torch.ones(2), torch.tensor([-4.0, -4.0]), valley, scheduled, 0, 0.25),
}


class Run(NamedTuple):
    problem: str
    adjoint: Any
    cut: int
    """After so many steps, again and again, the loop goes on from a constant."""
    claim: str  # of the paper


RUNS = (
    Run(INFLUENCE, todist.Recorded(), STEPS, "converges"),
    Run(INFLUENCE, todist.Recorded(), 1, "goes the wrong way"),
    Run(INFLUENCE, todist.Recorded(), 10, "goes the wrong way"),
    Run(INFLUENCE, todist.PersistentEvolutionStrategies(1, 0.1, unroll=1), STEPS, "converges"),
    Run(TOY, todist.Recorded(), STEPS, "stays on the plateau"),
    Run(TOY, todist.Recorded(), 10, "stays on the plateau"),
    Run(TOY, todist.EvolutionStrategies(1, 0.3), 10, "is biased"),
    Run(TOY, todist.PersistentEvolutionStrategies(1, 0.3, unroll=10), STEPS, "finds the minimum"),
)


def mean_loss(run: Run, theta: Tensor, pairs: int) -> Tensor:
    problem = PROBLEMS[run.problem]
    loop = partial(problem.loss, theta), problem.optimizer(theta)

    def one_pair(x: Tensor) -> Tensor:
        state: Any = None
        losses: list[Tensor] = []
        for _ in range(STEPS // run.cut):
            made = todist.inner_loop(*loop, x.detach(), run.cut, state=state, meta=theta, adjoint=run.adjoint)
            x, state, losses = made.params, made.state, [*losses, made.losses]
        return torch.cat(losses)[problem.skip :].mean()

    return torch.vmap(one_pair, randomness="different")(problem.start.expand(pairs, -1)).mean()


def meta_train(run: Run, meta_steps: int, pairs: int, seed: int) -> tuple[Tensor, ...]:
    """On some worker: the losses and the parameters of all meta-steps."""
    torch.manual_seed(seed)
    theta = PROBLEMS[run.problem].theta.clone().requires_grad_()
    optimizer = todist.Adam([theta], lr=PROBLEMS[run.problem].lr)
    history = []
    for _ in range(meta_steps):
        optimizer.zero_grad()
        loss = mean_loss(run, theta, 1 if run.adjoint == todist.Recorded() else pairs)
        history.append((loss.detach(), theta.detach().clone()))
        loss.backward()
        optimizer.step()
    return tuple(map(torch.stack, zip(*history, strict=True)))


def surface(rates: Tensor) -> Tensor:
    """The mean loss of the toy regression for all pairs of these logarithms."""
    grid = torch.cartesian_prod(rates, rates)

    def loss(theta: Tensor, x: Tensor) -> Tensor:
        return todist.inner_loop(partial(valley, theta), scheduled(theta), x, STEPS).losses.mean()

    with torch.no_grad():
        return torch.vmap(loss)(grid, torch.ones(len(grid), 2)).unflatten(0, (len(rates), -1))


def shown(run: Run) -> str:
    name, unroll = type(run.adjoint).__name__, getattr(run.adjoint, "unroll", None)
    settings = "" if unroll is None else f"unroll={unroll}"
    return f"{name}({settings}){'' if run.cut == STEPS else f', cut after {run.cut}'}"


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    in_turn = [RUNS[place] for place in (1, 3, 4, 5, 0, 2, 6, 7)]  # half of the work is in each half
    histories = todist.map(meta_train, in_turn, args=(args.meta_steps, args.pairs, args.seed))
    results = dict(zip(in_turn, histories, strict=True))
    print("| problem | adjoint | loss | parameters | the paper |\n|---|---|---|---|---|")
    for run in RUNS:
        losses, thetas = results[run]
        first, last = (", ".join(f"{x:.2f}" for x in thetas[place].tolist()) for place in (0, -1))
        loss = f"{losses[0]:.2f} → {losses[-1]:.2f}"
        print(f"| {run.problem} | `{shown(run)}` | {loss} | {first} → {last} | {run.claim} |")
    draw({run: thetas for run, (_, thetas) in results.items()}, args.output)


def draw(thetas: dict[Run, Tensor], output: Path) -> None:
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = torch.linspace(-5, 5, 41)
    shades = right.contourf(rates, rates, surface(rates).T.clamp(max=30), levels=24, cmap="Greys_r")
    figure.colorbar(shades, ax=right, label="mean loss")
    for number, run in enumerate(RUNS):
        axes, style = (left if run.problem == INFLUENCE else right), "--" if run.cut == 10 else "-"
        axes.plot(*thetas[run].T, f"C{number % 4}.{style}", label=shown(run))
    left.axhline(-1 / 6, color="0.5", linestyle=":", label="best")
    left.set(xlabel="meta-step", ylabel="parameter", title="Influence balancing")
    right.set(xlabel="log first rate", ylabel="log last rate", title="Toy regression", ylim=(-5, 7))
    left.legend(loc="center right", fontsize=8)
    right.legend(loc="upper left", fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    print(f"picture: {output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--meta-steps", type=int, default=50, help="of each run (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=32, help="of loops with noise (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/persistent_es.png"), help="a picture")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
