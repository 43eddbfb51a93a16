"""A user's own ``solve(matvec, b)`` → a :class:`Solver`, so that its solutions are differentiable, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchopt_dist import pytree
from torchopt_dist.core.types import TensorTree
from torchopt_dist.core.vjp import Tensors
from torchopt_dist.linear_solve._operator import BatchedOperator, LinearOperator, Product
from torchopt_dist.linear_solve.cg import solve_normal_cg
from torchopt_dist.linear_solve.solver import Outcome, Solver, SolverInfo, System
from torchopt_dist.torch_private import transforms_are_active

__all__ = ["as_solver"]


def as_solver(solve: Any) -> Solver:
    """Return a solver as it is, a function as a solver, and for ``None`` conjugate gradients on the normal equations.

    Raises:
        TypeError: ``solve`` is none of these.
    """
    if solve is None:
        return solve_normal_cg()
    if isinstance(solve, Solver):
        return solve
    if not callable(solve):
        raise TypeError(
            f"`solve` must be a solver, a function of a product and a right-hand side, or None, got {solve!r:.80}"
        )
    name = getattr(solve, "__name__", "")
    if name.startswith("solve_") and getattr(solve, "__module__", "").startswith(
        "torchopt_dist.linear_solve."
    ):
        raise TypeError(
            f"`solve` must be a solver, got the function {name}, which makes one: call it, `{name}()`"
        )
    return _FunctionSolver(function=solve)


@dataclass(frozen=True, kw_only=True)
class _FunctionSolver(Solver):
    function: Callable[[Callable[[TensorTree], TensorTree], TensorTree], TensorTree]

    def forward(
        self,
        spec: pytree.PyTreeSpec,
        operator: LinearOperator,
        params: Tensors,
        b: Tensors,
        start: Tensors,
    ) -> tuple[Tensors, SolverInfo]:
        """Call the function, which reports neither residual nor iterations."""
        x = self._call(spec, operator, params, b)
        unknown = torch.zeros(operator.batch_shape, device=b[0].device)
        return x, SolverInfo(unknown, unknown.long(), unknown == 0)

    def _call(
        self, spec: pytree.PyTreeSpec, operator: LinearOperator, params: Tensors, b: Tensors
    ) -> Tensors:
        if isinstance(operator, BatchedOperator):
            inner = operator.inner
            one = torch.vmap(
                lambda params, b: self._call(spec, inner, params, b),
                in_dims=(list(operator.in_dims), 0),
                randomness="same",
            )
            return one(params, b)
        matvec: Any = functools.partial(_product, spec, operator, params, operator.prepared(params, b))
        if transforms_are_active():  # a prepared product hides its tensors from them
            matvec = functools.partial(_product_of, spec, operator, params)
        x = self.function(matvec, pytree.unflatten(spec, b))
        return [leaf.clone() for leaf in pytree.flatten_like(spec, x, "solve(matvec, b)", "b")]

    def run(self, system: System) -> Outcome:
        """Not used: ``forward`` calls the function."""
        raise NotImplementedError("the function is called instead")


def _product(
    spec: pytree.PyTreeSpec, operator: LinearOperator, params: Tensors, product: Product, vector: TensorTree
) -> Any:
    leaves = pytree.flatten_like(spec, vector, "vector", "b")
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        return _product_of(spec, operator, params, vector)  # for products with the transpose
    with torch.enable_grad():
        return pytree.unflatten(spec, [leaf.detach() for leaf in product(leaves)])


def _product_of(
    spec: pytree.PyTreeSpec, operator: LinearOperator, params: Tensors, vector: TensorTree
) -> Any:
    return pytree.unflatten(spec, operator.apply(params, pytree.flatten_like(spec, vector, "vector", "b")))
