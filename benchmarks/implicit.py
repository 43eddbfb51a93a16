"""How long does iMAML's linear solve take on a net of a million parameters? Against TorchOpt's solvers, same product.

Twenty steps of conjugate gradients, of those on the normal equations, and of the Neumann series, with the Hessian of a
regularized loss. The product is torch's own: a backward pass through a gradient's graph. TorchOpt is timed if it is
installed (``pip install --no-deps torchopt``); the cost of the bare products is the floor. Then the memory that a whole
implicit gradient takes, after 20 and after 200 steps of the inner solver.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from page import ratio, table
from torch import Tensor
from workers import interleaved

from torchopt_dist import linear_solve
from torchopt_dist.diff.implicit import custom_root

try:
    import torchopt
except ImportError:
    torchopt = None

STEPS, WIDTH, LAYERS, BATCH = 20, 256, 16, 8


def loss_of(params: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
    for weight in params:
        x = torch.tanh(x @ weight)
    return F.mse_loss(x, y) + 5 * sum((weight * weight).sum() for weight in params)


def problem() -> tuple[tuple[Tensor, ...], Callable[[Any], Any], tuple[Tensor, ...]]:
    """Parameters, the Hessian's product, and a right-hand side."""
    torch.manual_seed(0)
    params = tuple(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS))
    x, y = torch.randn(2, BATCH, WIDTH)
    _, product = torch.func.vjp(torch.func.grad(lambda params: loss_of(params, x, y)), params)
    return params, lambda v: product(v)[0], tuple(torch.randn_like(weight) for weight in params)


def solvers() -> dict[str, dict[str, Callable[[Any, Any], Any]]]:
    exact = {"rtol": 0.0, "atol": 0.0, "maxiter": STEPS}
    quiet: dict[str, Any] = {**exact, "not_converged": "ignore"}
    ours = {
        "cg": linear_solve.solve_cg(**quiet),
        "normal cg": linear_solve.solve_normal_cg(**quiet),
        "Neumann": linear_solve.solve_neumann(alpha=0.08, **quiet),
    }
    rows = {name: {"ours": solve} for name, solve in ours.items()}
    if torchopt is not None:
        rows["cg"]["TorchOpt"] = torchopt.linear_solve.solve_cg(**exact)
        rows["normal cg"]["TorchOpt"] = torchopt.linear_solve.solve_normal_cg(**exact)
        rows["Neumann"]["TorchOpt"] = lambda product, b: torchopt.linalg.ns(
            product, b, maxiter=STEPS, alpha=0.08
        )
    return rows


def memory_of(steps: int) -> int:
    """The bytes of all tensors that one implicit gradient keeps alive between forward and backward."""
    kept: list[int] = []

    @custom_root(torch.func.grad(lambda w, theta: ((w - theta) ** 2).sum()), 1, solve=linear_solve.solve_cg())
    def solver(w: Tensor, theta: Tensor) -> Tensor:
        for _ in range(steps):
            w = w - 0.2 * 2 * (w - theta)
        return w

    theta = torch.randn(1_000_000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.nbytes), t)[1], lambda t: t):
        loss = solver(torch.zeros(1_000_000), theta).sum()
    loss.backward()
    return sum(kept)


TERMS = {
    "cg": "steps of conjugate gradients",
    "normal cg": "steps of them on the normal equations",
    "Neumann": "terms of the Neumann series",
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    params, product, b = problem()
    print(f"{sum(weight.numel() for weight in params):,} parameters, {STEPS} steps, batch {BATCH}.")
    rows = []
    with torch.no_grad():
        for name, ways in solvers().items():
            products = STEPS * (2 if name == "normal cg" else 1)
            timed: dict[str, Callable[[], Any]] = {
                way: lambda solve=solve: solve(product, b) for way, solve in ways.items()
            }
            timed["the bare products"] = lambda products=products: [product(b) for _ in range(products)]
            seconds = interleaved(timed, rounds=5, warmups=1)
            columns = ("ours", "TorchOpt", "the bare products")
            rows.append([name, *(f"{seconds[w] * 1e3:.0f} ms" if w in seconds else "" for w in columns)])
            if "TorchOpt" in seconds:
                part = f"{seconds['ours'] / seconds['TorchOpt']:.2f}"
                ratio(f"{STEPS} {TERMS[name]}, 1 M parameters", "TorchOpt's", part)
    table(["", "ours", "TorchOpt", "the bare products"], rows)
    few, many = memory_of(20), memory_of(200)
    print(f"Saved for backward: {few / 1e6:.0f} MB after 20 steps, {many / 1e6:.0f} MB after 200.")


if __name__ == "__main__":
    main()
