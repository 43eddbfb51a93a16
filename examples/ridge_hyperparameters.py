"""A penalty for each feature of a ridge regression, learned by gradients through the regression's solution.

    python examples/ridge_hyperparameters.py

The 10 features of the diabetes data set (442 patients) are joined by 40 features of noise. The regression weights
minimize the training loss with a penalty for each feature; the logarithms of the penalties minimize the loss on
held-out patients. The gradient with respect to the penalties goes through the minimum, by the implicit function theorem
(``custom_root``), whatever solver has found it.

Here the minimum has a closed form, so the program checks each gradient against autograd through this form; the two
agree to ten digits. The held-out loss falls below that of the best single penalty, because the noise is penalized away.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from torch import Tensor

from torchopt_dist import linear_solve
from torchopt_dist.diff.implicit import custom_root


class Split(NamedTuple):
    """Features and targets of some patients."""

    x: Tensor
    y: Tensor


def gradient(w: Tensor, train: Split, log_penalties: Tensor) -> Tensor:
    """The training objective's gradient with regard to the weights, zero at the solution."""
    return train.x.T @ (train.x @ w - train.y) / len(train.y) + log_penalties.exp() * w


@custom_root(gradient, argnums=2, solve=linear_solve.solve_cg(rtol=1e-12))
def fit(w: Tensor, train: Split, log_penalties: Tensor) -> Tensor:
    """Newton's step, from anywhere: conjugate gradients on the objective's Hessian."""
    solver = linear_solve.solve_cg(rtol=1e-12)
    start = gradient(w, train, log_penalties)
    return w - solver(lambda v: gradient(w + v, train, log_penalties) - start, start)


def closed_form(train: Split, log_penalties: Tensor) -> Tensor:
    hessian = train.x.T @ train.x / len(train.y) + torch.diag(log_penalties.exp())
    return torch.linalg.solve(hessian, train.x.T @ train.y / len(train.y))


def loss(w: Tensor, split: Split) -> Tensor:
    return (split.x @ w - split.y).square().mean()


def diabetes(noise: int, seed: int) -> tuple[Split, Split, Split]:
    """Training, validation and test patients; so many columns of noise after the 10 features."""
    x, y = (torch.tensor(array) for array in load_diabetes(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([x, torch.randn(len(x), noise, generator=generator, dtype=x.dtype)], dim=1)
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    train, validation, test = torch.randperm(len(x), generator=generator).split([100, 171, 171])
    return Split(x[train], y[train]), Split(x[validation], y[validation]), Split(x[test], y[test])


def best_single_penalty(train: Split, validation: Split, test: Split) -> float:
    """The test loss of the one penalty that does best on the validation patients."""
    candidates = [torch.full(train.x.shape[1:], p, dtype=train.x.dtype) for p in torch.linspace(-6, 3, 40)]
    best = min(candidates, key=lambda penalties: float(loss(closed_form(train, penalties), validation)))
    return float(loss(closed_form(train, best), test))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="of the outer optimizer")
    parser.add_argument("--noise", type=int, default=40, help="columns of noise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/ridge_hyperparameters.png"))
    args = parser.parse_args()
    train, validation, test = diabetes(args.noise, args.seed)
    single = best_single_penalty(train, validation, test)
    log_penalties = torch.full((10 + args.noise,), -1.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_penalties], lr=0.1)
    history, error = [], 0.0
    w = torch.zeros_like(log_penalties)
    for _ in range(args.steps):
        w = fit(w.detach(), train, log_penalties)
        validation_loss = loss(w, validation)
        optimizer.zero_grad()
        validation_loss.backward()
        exact = torch.autograd.grad(loss(closed_form(train, log_penalties), validation), log_penalties)[0]
        assert log_penalties.grad is not None
        error = max(error, float((log_penalties.grad - exact).norm() / exact.norm()))
        history.append((validation_loss.item(), float(loss(w.detach(), test))))
        optimizer.step()
    print(f"gradient against the closed form: relative error {error:.1e} at most")
    print(f"validation loss {history[0][0]:.3f} -> {history[-1][0]:.3f}")
    print(f"test loss {history[0][1]:.3f} -> {history[-1][1]:.3f}; best single penalty {single:.3f}")
    plot(args.output, history, single, log_penalties.detach().exp())
    print(f"picture saved as {args.output}")


def plot(path: Path, history: list[tuple[float, float]], single: float, penalties: Tensor) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, values in zip(("validation", "test"), zip(*history, strict=True), strict=True):
        left.plot(values, label=name)
    left.axhline(single, color="gray", linestyle="--", label="test, best single penalty")
    left.set(xlabel="outer step", ylabel="mean squared error", title="Loss")
    left.legend(loc="upper right", bbox_to_anchor=(1.0, 0.95))
    colors = ["tab:blue"] * 10 + ["tab:gray"] * (len(penalties) - 10)
    right.bar(range(len(penalties)), penalties.tolist(), color=colors)
    right.set(
        yscale="log", xlabel="feature: blue real, gray noise", ylabel="penalty", title="Learned penalties"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
