"""How fast three estimates of a hypergradient converge: the rates of the theorems, measured.

    python examples/hypergradients.py
    torchrun --nproc_per_node=2 examples/hypergradients.py

A hypergradient is the gradient of a validation loss through training. Grazzi et al. (2020,
https://arxiv.org/abs/2006.16218) bound the errors of three estimates, where a step of training is a contraction by a
factor ``q``. With ``t`` steps, and with ``k`` iterations for the linear system of the implicit ones, these are

- unrolled, also called iterative differentiation (ITD): of order ``t q^t``,
- implicit by fixed-point iteration (AID-FP): of order ``q^t + q^k``,
- implicit by conjugate gradients (AID-CG): of order ``q^t + p^k``, where ``p = (√κ - 1) / (√κ + 1)`` is smaller.

As in the paper, the problem is logistic regression on made data with a penalty for each feature; these penalties are
the hyperparameters. Training is gradient descent with the best constant rate, for which ``q = (κ - 1) / (κ + 1)`` with
the condition number ``κ`` of the Hessian at the minimum. Newton's method and a direct solve give the exact gradient,
without the package. Only the argument ``adjoint=`` changes between estimates. The problems are tasks, spread over the
workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist import linear_solve

FEATURES, EXAMPLES = 40, 200
CONVERGED = 200
"""Steps after which only the error of the linear system is left."""


class Problem(NamedTuple):
    x: Tensor
    y: Tensor
    validation_x: Tensor
    validation_y: Tensor
    log_penalties: Tensor

    def loss(self, w: Tensor) -> Tensor:
        penalty = 0.5 * (self.log_penalties.exp() * w.square()).sum()
        return F.binary_cross_entropy_with_logits(self.x @ w, self.y) + penalty

    def hypergradient(self, steps: int, lr: float, adjoint: Any) -> Tensor:
        w = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
        trained = todist.inner_loop(
            self.loss, todist.sgd(lr=lr), w, steps, meta=self.log_penalties, adjoint=adjoint
        )
        outer = F.binary_cross_entropy_with_logits(self.validation_x @ trained.params, self.validation_y)
        (found,) = torch.autograd.grad(outer, self.log_penalties)
        return found

    def exact(self) -> tuple[Tensor, Tensor]:
        """The hypergradient, and the eigenvalues of the Hessian at the minimum, by Newton's method."""
        w, penalties = torch.zeros(FEATURES, dtype=torch.float64), self.log_penalties.detach().exp()
        for _ in range(20):
            p = (self.x @ w).sigmoid()
            hessian = self.x.mT * (p * (1 - p)) @ self.x / EXAMPLES + penalties.diag()
            w = w - torch.linalg.solve(hessian, self.x.mT @ (p - self.y) / EXAMPLES + penalties * w)
        residual = (self.validation_x @ w).sigmoid() - self.validation_y
        outer = self.validation_x.mT @ residual / EXAMPLES
        return -penalties * w * torch.linalg.solve(hessian, outer), torch.linalg.eigvalsh(hessian)


def problem(seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * EXAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    truth = torch.randn(FEATURES, dtype=torch.float64, generator=generator)
    noise = torch.randn(2 * EXAMPLES, dtype=torch.float64, generator=generator)
    y = (x @ truth + 3 * noise > 0).double()
    log_penalties = torch.full((FEATURES,), -5.0, dtype=torch.float64, requires_grad=True)
    return Problem(x[:EXAMPLES], y[:EXAMPLES], x[EXAMPLES:], y[EXAMPLES:], log_penalties)


def estimates(iterations: int, lr: float) -> dict[str, tuple[int, Any]]:
    """By name: the number of steps, and the adjoint."""
    options: Any = {"maxiter": iterations, "rtol": 1e-15, "not_converged": "ignore"}
    fixed_point = todist.Implicit(linear_solve.solve_neumann(alpha=lr, **options), not_converged="ignore")
    conjugate = todist.Implicit(linear_solve.solve_cg(**options), not_converged="ignore")
    return {
        "ITD": (iterations, todist.Recorded()),
        "AID-FP": (iterations, fixed_point),
        "AID-CG": (iterations, conjugate),
        "AID-FP, trained": (CONVERGED, fixed_point),
        "AID-CG, trained": (CONVERGED, conjugate),
    }


BOUNDS = {"ITD": "t q^t", "AID-FP": "q^t + q^k", "AID-CG": "q^t + p^k"}
BOUNDS |= {"AID-FP, trained": "q^k", "AID-CG, trained": "p^k"}


def errors(seed: int, grid: list[int]) -> tuple[dict[str, Tensor], float, float]:
    """On some worker: relative errors of every estimate of one problem; and its ``q`` and ``p``."""
    given = problem(seed)
    exact, eigenvalues = given.exact()
    low, high = eigenvalues[0].item(), eigenvalues[-1].item()
    found: dict[str, list[Tensor]] = {name: [] for name in BOUNDS}
    for iterations in grid:
        for name, (steps, adjoint) in estimates(iterations, 2 / (low + high)).items():
            gradient = given.hypergradient(steps, 2 / (low + high), adjoint)
            found[name].append((gradient - exact).norm() / exact.norm())
    root = (high / low) ** 0.5
    q, p = (high - low) / (high + low), (root - 1) / (root + 1)
    return {name: torch.stack(values) for name, values in found.items()}, q, p


def factor(name: str, grid: list[int], values: Tensor) -> float:
    """By which an error falls in an iteration, from a line through its logarithm; ITD without its factor ``t``."""
    t = torch.tensor(grid, dtype=torch.float64)
    chosen = (values < 1e-2) & (values > 1e-12)
    ordinate = (values / t if name == "ITD" else values)[chosen].log()
    abscissa = t[chosen] - t[chosen].mean()
    return float(((abscissa * ordinate).sum() / abscissa.square().sum()).exp())


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    grid = [*range(2, 20, 3), *range(20, args.iterations + 1, 10)]
    found = todist.map(errors, range(args.problems), args=(grid,))
    print("| estimate | bound | factor an iteration, measured | by the theorem | error after 20 iterations |")
    print("|---|---|---|---|---|")
    for name, bound in BOUNDS.items():
        measured = torch.tensor([factor(name, grid, values[name]) for values, _, _ in found])
        theory = torch.tensor([p if name == "AID-CG, trained" else q for _, q, p in found])
        error = torch.stack([values[name][grid.index(20)] for values, _, _ in found]).log().mean().exp()
        limit = f"{'at most ' if 'CG, ' in name else ''}{theory.mean():.3f}"
        print(
            f"| {name} | {bound} | {measured.mean():.3f} ± {(measured - theory).std():.3f} | {limit} | {error:.1e} |"
        )
    draw(grid, found[0], args.output)


def draw(grid: list[int], found: tuple[dict[str, Tensor], float, float], output: Path) -> None:
    """Of the first problem: the errors, and the rates of the theorems as dotted lines."""
    values, q, p = found
    figure = Figure(figsize=(10, 4), layout="constrained")
    t = torch.tensor(grid, dtype=torch.float64)
    for axes, names in zip(
        figure.subplots(1, 2, sharey=True), (list(BOUNDS)[:3], list(BOUNDS)[3:]), strict=True
    ):
        for number, name in enumerate(names, start=3 - len(names)):
            axes.plot(grid, values[name].numpy(), f"C{number}.-", label=name)
            rate = (p if "CG, " in name else q) ** t * (t if name == "ITD" else 1)
            middle = next((place for place, value in enumerate(values[name]) if value < 1e-3), -1)
            bound = rate * values[name][middle] / rate[middle]
            axes.plot(grid, bound.numpy(), f"C{number}:")
        axes.plot([], "k:", label="rate of the theorem")
        axes.set(yscale="log", ylim=(1e-16, 2), xlabel="iterations")
        axes.legend()
    figure.axes[0].set(ylabel="relative error", title="t steps, and k = t iterations")
    figure.axes[1].set(title="k iterations, after training has converged")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    print(f"picture: {output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--problems", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=100, help="at most (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/hypergradients.png"), help="picture to draw"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
