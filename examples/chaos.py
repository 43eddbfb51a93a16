"""Where training is chaotic, exact gradients explode, and those of evolution strategies do not.

    python examples/chaos.py
    torchrun --nproc_per_node=2 examples/chaos.py

Metz et al. (2021, https://arxiv.org/abs/2111.05803) trace useless gradients of loops to the spectrum of the loop's
Jacobian. If its largest eigenvalue stays above 1, a small change grows with each step, and so does the gradient, while
the outcome itself stays bounded. An estimate from outcomes alone is as bounded as these.

Here the loop trains a network of 8 hidden units by gradient descent on 32 noisy points, and the gradient is that of the
last loss with respect to the logarithm of the learning rate. Above a rate of about 5 training is chaotic. Both
estimates are of the same gradient, that of the loss smoothed by noise on this logarithm: ``Recorded()`` at a noisy
rate, and a pair of ``EvolutionStrategies(1, sigma)``. The program measures their spread over the noise, for many rates
and for many numbers of steps. The rates and numbers are tasks, spread over the workers.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import torchopt_dist as todist

HIDDEN, POINTS = 8, 32
STABLE, CHAOTIC = 1.0, 10.0
"""Two of the rates, for the growth with the steps."""


class Case(NamedTuple):
    rate: float
    steps: int


class Spread(NamedTuple):
    """Of the samples of a case."""

    losses: Tensor
    exact: float
    """The standard deviation of exact gradients, one a noisy rate."""
    evolution: float
    """The standard deviation of estimates, one a pair."""


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Points, their labels, of which some are wrong, and the first weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(POINTS, 2, dtype=torch.float64, generator=generator)
    wrong = torch.rand(POINTS, generator=generator) < 0.1
    weights = 0.7 * torch.randn(4 * HIDDEN, dtype=torch.float64, generator=generator)
    return x, ((x.prod(dim=1) > 0) ^ wrong).double(), weights


Adjoint = todist.Recorded | todist.EvolutionStrategies


def spread(case: Case, samples: int, sigma: float, seed: int) -> Spread:
    """On some worker: all samples of a case at once, by ``vmap``."""
    torch.manual_seed(seed)
    x, y, weights = problem()

    def loss(w: Tensor) -> Tensor:
        matrix, bias, out = w[: 2 * HIDDEN].reshape(2, HIDDEN), w[2 * HIDDEN : 3 * HIDDEN], w[3 * HIDDEN :]
        return F.binary_cross_entropy_with_logits(torch.tanh(x @ matrix + bias) @ out, y)

    def gradients(log_rates: Tensor, adjoint: Adjoint) -> tuple[Tensor, Tensor]:
        """The last losses and their gradients, one for each logarithm of a rate."""

        def last_loss(log_rate: Tensor, w: Tensor) -> Tensor:
            # A function of the step: so noise goes to the logarithm.
            optimizer = todist.sgd(lr=lambda step: log_rate.exp())
            result = todist.inner_loop(loss, optimizer, w, case.steps, meta=log_rate, adjoint=adjoint)
            return result.losses[-1]

        log_rates.requires_grad_()
        starts = weights.expand(samples, -1)
        losses = torch.vmap(last_loss, randomness="different")(log_rates, starts)
        return losses.detach(), torch.autograd.grad(losses.sum(), log_rates)[0]

    center = torch.full((samples,), math.log(case.rate), dtype=torch.float64)
    noise = sigma * torch.randn(samples, dtype=torch.float64)
    losses, exact = gradients(center + noise, todist.Recorded())
    evolution = gradients(center.clone(), todist.EvolutionStrategies(1, sigma))[1]
    return Spread(losses, float(exact.std()), float(evolution.std()))


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    rates = torch.logspace(-0.5, 1.5, args.rates).tolist()
    lengths = [round(args.steps * part) for part in (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)]
    by_rate = [Case(rate, args.steps) for rate in (*rates, STABLE, CHAOTIC)]
    by_steps = [Case(rate, steps) for steps in lengths for rate in (STABLE, CHAOTIC)]
    cases = list(dict.fromkeys([*by_rate, *by_steps]))
    in_turn = [*cases[::2], *cases[1::2]]  # so that half of the work is in each half
    spreads = todist.map(spread, in_turn, args=(args.samples, args.sigma, args.seed))
    found = dict(zip(in_turn, spreads, strict=True))
    print("| rate | steps | last loss | `Recorded()`, spread | `EvolutionStrategies()`, spread | the paper |")
    print("|---|---|---|---|---|---|")
    for case in by_steps:
        losses, exact, evolution = found[case]
        claim = "exact is better" if case.rate == STABLE else "exact explodes"
        loss = f"{losses.mean():.3f} ± {losses.std():.3f}"
        print(f"| {case.rate:g} | {case.steps} | {loss} | {exact:.1e} | {evolution:.1e} | {claim} |")
    draw(sorted(by_rate), by_steps, found, args.output)


def draw(by_rate: list[Case], by_steps: list[Case], found: dict[Case, Spread], output: Path) -> None:
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    rates = [case.rate for case in by_rate]
    for case in by_rate:
        losses = found[case].losses
        left.plot([case.rate] * len(losses), losses.numpy(), "C7.", alpha=0.4)
    left.set(xscale="log", yscale="log", xlabel="learning rate", title="last loss, at noisy rates")
    middle.plot(rates, [found[case].exact for case in by_rate], "C1o-", label="Recorded()")
    middle.plot(rates, [found[case].evolution for case in by_rate], "C0o-", label="EvolutionStrategies()")
    middle.set(xscale="log", yscale="log", xlabel="learning rate", title="standard deviation of a gradient")
    for rate, line in ((STABLE, "--"), (CHAOTIC, "-")):
        cases = [case for case in by_steps if case.rate == rate]
        steps = [case.steps for case in cases]
        right.plot(
            steps, [found[case].exact for case in cases], f"C1o{line}", label=f"Recorded(), rate {rate:g}"
        )
        right.plot(
            steps,
            [found[case].evolution for case in cases],
            f"C0o{line}",
            label=f"EvolutionStrategies(), rate {rate:g}",
        )
    right.set(yscale="log", xlabel="steps", title="standard deviation of a gradient")
    middle.legend()
    right.legend(fontsize=8, loc="upper left")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    print(f"picture: {output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=int, default=91, help="to try (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of training (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=32, help="of each estimate (default: %(default)s)")
    parser.add_argument("--sigma", type=float, default=0.05, help="of the noise (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/chaos.png"), help="picture to draw")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
