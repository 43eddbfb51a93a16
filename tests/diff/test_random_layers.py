"""Random implicit layers have the values and gradients of Newton's method unrolled by hand, in every transform.

``make fuzz`` runs more of them. ``TODIST_FUZZ_SEED=<seed>`` runs the layers from this seed on, and
``TODIST_FUZZ_LOOPS`` says how many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist.diff.implicit import custom_fixed_point, custom_root

MORE = os.environ.get("TODIST_FUZZ_LOOPS")
LAYERS = [int(MORE)] if MORE else [8, pytest.param(20, marks=pytest.mark.nightly)]
SEED = int(os.environ.get("TODIST_FUZZ_SEED") or (random.randrange(10**9) if MORE else 0))
D = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13, "not_converged": "ignore"}
RATE = 0.1

SOLVES: list[Callable[[], Any]] = [
    lambda: todist.linear_solve.solve_gmres(**TIGHT),
    lambda: todist.linear_solve.solve_bicgstab(**TIGHT),
    lambda: todist.linear_solve.solve_normal_cg(**TIGHT),
    todist.linear_solve.solve_inv,
]
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Drawn:
    """``A x + 0.3 tanh(c x) + 0.2 c x³ = b``, whose Jacobian is definite, as a tree or as a vector; and its solver."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        n = self.n = draw.choice([1, 2, 4])
        a, skew = torch.randn(n, n, dtype=D), torch.randn(n, n, dtype=D)
        matrix = a @ a.T / n + 2 * torch.eye(n, dtype=D) + 0.3 * (skew - skew.T)
        self.given = (
            matrix.requires_grad_(),
            torch.randn(n, dtype=D, requires_grad=True),
            torch.rand((), dtype=D, requires_grad=True),
        )
        self.is_tree, self.is_fixed_point = draw.random() < 0.5, draw.random() < 0.4
        self.way = draw.choice(list(WAYS))
        self.inner = draw.choice(["by hand", "newton", "anderson", "not at all"])
        decorate: Any = custom_fixed_point if self.is_fixed_point else custom_root
        equation = self.moved if self.is_fixed_point else self.residual
        self.solver = decorate(equation, argnums=(1, 2, 3), solve=draw.choice(SOLVES)())(self._solved)

    def tree(self, x: Tensor) -> Any:
        return {"a": x[: self.n // 2], "z": [x[self.n // 2 :]]} if self.is_tree else x

    def vector(self, tree: Any) -> Tensor:
        return torch.cat([tree["a"], tree["z"][0]]) if self.is_tree else tree

    def residual(self, tree: Any, A: Tensor, b: Tensor, c: Tensor) -> Any:
        x = self.vector(tree)
        return self.tree(A @ x + 0.3 * torch.tanh(c * x) + 0.2 * c * x**3 - b)

    def moved(self, tree: Any, A: Tensor, b: Tensor, c: Tensor) -> Any:
        return self.tree(self.vector(tree) - RATE * self.vector(self.residual(tree, A, b, c)))

    def by_hand(self, A: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x = torch.zeros(self.n, dtype=D)
        for _ in range(30):
            slope = 0.3 * c * (1 - torch.tanh(c * x) ** 2) + 0.6 * c * x**2
            x = x - torch.linalg.solve(
                A + torch.diag(slope), self.vector(self.residual(self.tree(x), A, b, c))
            )
        return x

    def _solved(self, start: Any, A: Tensor, b: Tensor, c: Tensor) -> Any:
        if (
            self.inner == "not at all"
        ):  # the start is the solution, for all samples if they share the arguments
            return start
        if self.inner == "by hand":
            return self.tree(self.by_hand(A, b, c))
        options = {"rtol": 1e-12, "atol": 1e-13, "not_converged": "ignore"}
        if self.inner == "newton":
            return todist.nonlinear_solve.newton(maxiter=30, **options)(
                lambda x: self.residual(x, A, b, c), start
            )
        return todist.nonlinear_solve.anderson(maxiter=100, **options)(
            lambda x: self.moved(x, A, b, c), start
        )

    def layer(self, A: Tensor, b: Tensor, c: Tensor) -> Tensor:
        start = torch.zeros(self.n, dtype=D)
        if self.inner == "not at all":
            start = self.by_hand(A.detach(), b.detach(), c.detach())
        return self.vector(self.solver(self.tree(start), A, b, c))

    def found(self, layer: Function, way: Callable[..., list[Tensor]]) -> list[Tensor]:
        weights = torch.linspace(0.5, 1.5, self.n, dtype=D)
        return way(lambda A, b, c: (layer(A, b, c) * weights).sin().sum(), *self.given)


def _orders(f: Function, *given: Tensor) -> list[Tensor]:
    value = f(*given)
    first = torch.autograd.grad(value, given, create_graph=True)
    return [value, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), given)]


def _mapped(chunk_size: int | None, dims: tuple[int | None, ...]) -> Callable[..., list[Tensor]]:
    def way(f: Function, *given: Tensor) -> list[Tensor]:
        several = [
            x if dim is None else torch.stack([x, 0.5 * x, x]) for x, dim in zip(given, dims, strict=True)
        ]
        values = torch.vmap(f, in_dims=dims, chunk_size=chunk_size)(*several)
        return _with_gradients(values @ torch.arange(1.0, 4.0, dtype=D), given)

    return way


def _nested(f: Function, A: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    def over(b: Tensor) -> Tensor:
        return torch.vmap(lambda c: f(A, b, c))(torch.stack([c, 0.5 * c]))

    return _with_gradients(torch.vmap(over)(torch.stack([b, -b])).square().sum(), (A, b, c))


def _with_gradients(value: Tensor, given: tuple[Tensor, ...]) -> list[Tensor]:
    return [value, *torch.autograd.grad(value, given)]


def _gradients_in_vmap(f: Function, *given: Tensor) -> list[Tensor]:
    A, b, c = (x.detach() for x in given)
    grad = torch.func.grad(f, argnums=(0, 1, 2))
    return list(torch.vmap(grad, in_dims=(None, 0, None))(A, torch.stack([b, 2 * b]), c))


def _hessian(f: Function, *given: Tensor) -> list[Tensor]:
    return [torch.func.jacrev(torch.func.grad(f, argnums=1), argnums=1)(*(x.detach() for x in given))]


def _checkpointed(f: Function, *given: Tensor) -> list[Tensor]:
    return _with_gradients(torch.utils.checkpoint.checkpoint(f, *given, use_reentrant=False), given)


WAYS: dict[str, Callable[..., list[Tensor]]] = {
    "two orders": _orders,
    "vmap": _mapped(None, (None, 0, None)),
    "vmap in chunks": _mapped(2, (None, 0, 0)),
    "vmap in vmap": _nested,
    "gradients in vmap": _gradients_in_vmap,
    "hessian": _hessian,
    "checkpoint": _checkpointed,
}


@pytest.mark.timeout(max(300, int(MORE or 0)))
@pytest.mark.parametrize("layers", LAYERS)
def test_random_layers_have_the_gradients_of_unrolled_ones(layers: int) -> None:
    print(f"TODIST_FUZZ_SEED={SEED}: {layers} layers")
    for seed in range(SEED, SEED + layers):
        drawn = Drawn(seed)
        way = WAYS[drawn.way]
        found, expected = drawn.found(drawn.layer, way), drawn.found(drawn.by_hand, way)
        where = f"TODIST_FUZZ_SEED={seed}, {drawn.way}, {drawn.inner}"
        torch.testing.assert_close(
            found, expected, rtol=1e-6, atol=1e-8, msg=lambda m, where=where: f"{where}: {m}"
        )
