"""How accurate the meta-gradients of implicit MAML and of MAML are, and how much memory they take.

    python examples/imaml_accuracy.py
    torchrun --nproc_per_node=2 examples/imaml_accuracy.py

Implicit MAML (iMAML, Rajeswaran et al., 2019, https://arxiv.org/abs/1909.04630) adapts to a task by gradient descent on
its loss plus a squared distance to the meta-parameters. The meta-gradient is that of the minimum, from some products
with the Hessian in conjugate gradients (CG). Figure 2 of the paper compares it with MAML, which differentiates the
steps, and with first-order MAML:

- On linear regression, whose exact meta-gradient is known, iMAML's error falls with the inner steps until the products
  limit it. It is smaller than MAML's for the same steps. First-order MAML's does not fall.
- MAML's memory grows with the steps, and iMAML's does not.

The tasks of a meta-gradient are spread over the workers, and each computes all of its own at once. The memory is that
of the tensors that autograd has saved at a time at most, for one task. Only the argument ``adjoint=`` changes.
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
from torchopt_dist import linear_solve

FEATURES, POINTS, PROXIMITY, LR = 50, 40, 0.3, 0.2


class Tasks(NamedTuple):
    """Linear regressions, of shape (tasks, points, features) and (tasks, points)."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def sample(count: int, seed: int) -> tuple[Tasks, Tensor]:
    """Some tasks, and meta-parameters near to what they have in common."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    scales = torch.linspace(0.2, 1.2, FEATURES, dtype=torch.float64)
    x, test_x = normal(count, POINTS, FEATURES) * scales, normal(count, POINTS, FEATURES) * scales
    truth = 1 + normal(count, FEATURES, 1)
    y, test_y = (x @ truth).squeeze(-1), (test_x @ truth).squeeze(-1)
    return Tasks(x, y, test_x, test_y), normal(FEATURES).requires_grad_()


def squared_error(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (x @ w - y).square().mean()


def task_loss(task: Tasks, theta: Tensor, steps: int, adjoint: Any) -> Tensor:
    """The test loss of one task after adaptation."""

    def loss(w: Tensor) -> Tensor:
        return squared_error(w, task.x, task.y) + 0.5 * PROXIMITY * (w - theta).square().sum()

    adapted = todist.inner_loop(loss, todist.sgd(lr=LR), theta, steps, meta=theta, adjoint=adjoint)
    return squared_error(adapted.params, task.test_x, task.test_y)


def one_gradient(task: Tasks, theta: Tensor, steps: int, adjoint: Any) -> Tensor:
    return torch.autograd.grad(task_loss(task, theta, steps, adjoint), theta)[0]


all_losses = todist.parallelize(todist.tasks, todist.mean_reducer, vectorize=True)(task_loss)


@torch.no_grad()
def exact(tasks: Tasks, theta: Tensor) -> Tensor:
    """The meta-gradient by linear algebra."""
    hessian = tasks.x.mT @ tasks.x / POINTS + PROXIMITY * torch.eye(FEATURES, dtype=torch.float64)
    right = tasks.x.mT @ tasks.y.unsqueeze(-1) / POINTS + PROXIMITY * theta.unsqueeze(-1)
    adapted = torch.linalg.solve(hessian, right)
    outer = tasks.test_x.mT @ (tasks.test_x @ adapted - tasks.test_y.unsqueeze(-1)) / POINTS
    return PROXIMITY * torch.linalg.solve(hessian, outer).squeeze(-1).mean(dim=0)


class Saved:
    """A tensor that autograd has saved; the class counts them while they live."""

    now, most = 0, 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
        Saved.now += self.size
        Saved.most = max(Saved.most, Saved.now)

    def __del__(self) -> None:
        Saved.now -= self.size


def peak_memory(meta_gradient: Callable[[], Any]) -> int:
    """Bytes."""
    Saved.most = Saved.now
    before = Saved.now
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        meta_gradient()
    return Saved.most - before


def implicit(products: int) -> todist.Implicit:
    solver = linear_solve.solve_cg(maxiter=products, rtol=1e-15, not_converged="ignore")
    return todist.Implicit(solver, not_converged="ignore")


METHODS = {
    "MAML: `Recorded()`": (todist.Recorded(), "error falls, memory grows"),
    "first-order MAML: `FirstOrder()`": (todist.FirstOrder(), "error stays"),
    "iMAML: `Implicit()`, 2 CG steps": (implicit(2), "error falls to a limit, memory is flat"),
    "iMAML: `Implicit()`, 5 CG steps": (implicit(5), "a smaller limit"),
    "iMAML: `Implicit()`, 20 CG steps": (implicit(20), "smallest error"),
}


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    tasks, theta = sample(args.tasks, args.seed)
    true = exact(tasks, theta)
    one = Tasks(*(part[0] for part in tasks))
    shared = todist.replicated(theta)
    errors: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    for name, (adjoint, _) in METHODS.items():
        errors[name], memory[name] = [], []
        for steps in args.steps:
            (gradient,) = torch.autograd.grad(all_losses(tasks, shared, steps, adjoint), theta)
            errors[name].append(float((gradient - true).norm() / true.norm()))
            meta_gradient = partial(one_gradient, one, theta, steps, adjoint)
            memory[name].append(peak_memory(meta_gradient) / 1024)
    names = [f"{steps} step{'s' * (steps > 1)}" for steps in args.steps]
    print(
        f"| meta-gradient | error: {' | '.join(names)} | KiB: {names[0]} | {names[-1]} | Figure 2 of the paper |"
    )
    print("|---" * (len(names) + 4) + "|")
    for name, (_, claim) in METHODS.items():
        row = [f"{error:.1e}" for error in errors[name]]
        row += [f"{kept:.0f}" for kept in (memory[name][0], memory[name][-1])]
        print(f"| {name} | {' | '.join(row)} | {claim} |")
    draw(args.steps, errors, memory, args.output)


def draw(
    steps: list[int], errors: dict[str, list[float]], memory: dict[str, list[float]], output: Path
) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, mark in zip(errors, "osDv^", strict=True):
        left.plot(steps, errors[name], marker=mark, label=name.replace("`", ""))
        right.plot(steps, memory[name], marker=mark)
    left.set(xscale="log", yscale="log", ylabel="relative error of the meta-gradient")
    right.set(xscale="log", yscale="log", ylabel="KiB that autograd saves, at most")
    for axes in (left, right):
        axes.set_xlabel("inner steps")
        axes.set_xticks(steps, [str(count) for count in steps])
        axes.minorticks_off()
    left.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    print(f"picture: {output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 5, 10, 20, 40, 80], help="inner steps")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/imaml_accuracy.png"), help="picture to draw"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
