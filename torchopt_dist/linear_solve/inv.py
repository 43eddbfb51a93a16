"""Any regular system → its solution, by building the whole matrix and factorizing it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchopt_dist.core.types import Numeric
from torchopt_dist.linear_solve.solver import Outcome, Solver, System

__all__ = ["DirectSolver", "solve_inv"]


def solve_inv(*, ridge: Numeric | None = None) -> Solver:
    """Build the matrix from as many products as it has columns, and solve with it; for small systems.

    The matrix includes the blocks between different leaves. As with every solver, differentiating the result needs no
    graph of these computations.

    Args:
        ridge: as in :func:`solve_cg`.

    Returns:
        The solver. It reports 0 iterations, and raises ``torch.linalg.LinAlgError`` for a singular matrix.

    Raises:
        ValueError: ``ridge`` is below 0, or a tensor of more than one element.
    """
    return DirectSolver(ridge=ridge)


@dataclass(frozen=True, kw_only=True)
class DirectSolver(Solver):
    """The solver that :func:`solve_inv` makes."""

    def run(self, system: System) -> Outcome:
        """Solve a batch of systems."""
        b = system.b
        columns = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
        matrix = torch.stack([system.product(column.expand(b.shape)) for column in columns], dim=-1)
        x, info = torch.linalg.solve_ex(matrix, b.unsqueeze(-1))
        x = x.squeeze(-1)
        residual = (b - (matrix @ x.unsqueeze(-1)).squeeze(-1)).norm(dim=-1)
        iterations = torch.zeros_like(residual)
        if bool((info != 0).any()):
            return Outcome(
                x, residual + float("inf"), iterations, "`solve_inv` needs a matrix that is not singular"
            )
        return Outcome(x, residual, iterations)
