"""Any square system → its solution, by conjugate gradients on the normal equations ``Aᴴ A x = Aᴴ b``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torchopt_dist import pytree
from torchopt_dist.core.vjp import Tensors
from torchopt_dist.linear_solve._operator import LinearOperator, NormalOperator
from torchopt_dist.linear_solve.cg import ConjugateGradient
from torchopt_dist.linear_solve.solver import KrylovOptions, Solver, SolverInfo

__all__ = ["NormalConjugateGradient", "solve_normal_cg"]


def solve_normal_cg(**options: Unpack[KrylovOptions]) -> Solver:
    """Conjugate gradients on ``(Aᴴ A + ridge · I) x = Aᴴ b``, for any matrix: two products per iteration.

    The matrix need be neither symmetric nor definite; if it is singular, the result is a least-squares solution. The
    condition number is squared, so :func:`solve_gmres` or :func:`solve_bicgstab` may be faster.

    Args:
        options: as in :func:`solve_cg`, for the matrix ``Aᴴ A`` and the right-hand side ``Aᴴ b``: the residual is
            ``‖Aᴴ (b - A x)‖``, and ``M`` an approximate inverse of ``Aᴴ A``.

    Returns:
        The solver; the residual that it reports is that of the normal equations.
    """
    return NormalConjugateGradient(**options)


@dataclass(frozen=True, kw_only=True)
class NormalConjugateGradient(ConjugateGradient):
    """The solver that :func:`solve_normal_cg` makes."""

    def solve(
        self, operator: LinearOperator, params: Tensors, b: Tensors, spec: pytree.PyTreeSpec
    ) -> tuple[Tensors, SolverInfo]:
        """Solve the normal equations."""
        right = operator.transposed().apply(params, b)
        return super().solve(NormalOperator(operator), params, right, spec)
