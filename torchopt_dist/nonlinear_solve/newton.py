"""A function → its root, by Newton's method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor

from torchopt_dist.core.vjp import vjp
from torchopt_dist.linear_solve.solver import Solver
from torchopt_dist.nonlinear_solve.solver import NonlinearSolver, NonlinearSolverOptions

__all__ = ["Newton", "newton"]


def newton(
    *, linear_solver: Solver | None = None, **options: Unpack[NonlinearSolverOptions]
) -> NonlinearSolver:
    """Newton's method for ``function(x) = 0``: solve with the Jacobian in every step.

    Args:
        linear_solver: solves for each step, such as ``linear_solve.solve_gmres()``; not inside ``torch.func``. By
            default the whole Jacobian is built, from as many products as there are elements.
        options: as in :func:`fixed_point_iteration`, for the residual ``‖function(x)‖``; ``maxiter`` is 50, if not
            given.

    Returns:
        The solver. It raises ``torch.linalg.LinAlgError`` for a singular Jacobian.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> import torch
        >>> newton()(lambda x: x**2 - 2, torch.tensor(1.0))
        tensor(1.4142)
    """
    return Newton(linear_solver=linear_solver, **options)


@dataclass(frozen=True, kw_only=True)
class Newton(NonlinearSolver):
    """The solver that :func:`newton` makes."""

    linear_solver: Solver | None = field(default=None)
    maxiter: int = 50
    solves_for_root = True

    def _check_in_transform(self) -> None:
        """See :class:`NonlinearSolver`."""
        if self.linear_solver is not None:
            raise ValueError("inside a `torch.func` transform Newton's method takes no `linear_solver`")

    def steps(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Step by step."""
        while True:
            value = function(x)
            yield x, value
            # Only steps that are to be unrolled need a Jacobian with a derivative.
            with torch.set_grad_enabled(torch.is_grad_enabled() and value.requires_grad):
                step = self._step(function, value, x)
            x = x - step

    def _step(self, function: Callable[[Tensor], Tensor], value: Tensor, x: Tensor) -> Tensor:
        pulled = vjp(lambda points: [function(points[0])], [x])[1]
        if self.linear_solver is None:
            rows = [pulled([row])[0] for row in torch.eye(len(value), dtype=value.dtype, device=value.device)]
            return torch.linalg.solve(torch.stack(rows), value)

        def product(vector: Tensor) -> Tensor:
            zeros = torch.zeros_like(value)
            with torch.enable_grad():
                transposed = vjp(lambda points: [function(points[0])], [x])[1]
                return vjp(lambda points: transposed(points), [zeros])[1]([vector])[0]

        return self.linear_solver(product, value)
