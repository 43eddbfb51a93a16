"""Any square system → its solution, by conjugate gradients on the normal equations ``Aᴴ A x = Aᴴ b``."""

from __future__ import annotations

from dataclasses import dataclass

from torchopt_dist import pytree
from torchopt_dist.arguments.options import hinted
from torchopt_dist.core.types import Numeric, TensorTree
from torchopt_dist.core.vjp import Tensors
from torchopt_dist.linear_solve._operator import LinearOperator, NormalOperator
from torchopt_dist.linear_solve.cg import ConjugateGradient
from torchopt_dist.linear_solve.solver import NotConverged, Preconditioner, Solver, SolverInfo

__all__ = ["NormalConjugateGradient", "solve_normal_cg"]


@hinted
def solve_normal_cg(
    *,
    ridge: Numeric | None = None,
    init: TensorTree = None,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Preconditioner = None,
    not_converged: NotConverged = "warn",
) -> Solver:
    """Conjugate gradients on ``(Aᴴ A + ridge · I) x = Aᴴ b``, for any matrix: two products per iteration.

    The matrix need be neither symmetric nor definite; if it is singular, the result is a least-squares solution. The
    condition number is squared, so :func:`solve_gmres` or :func:`solve_bicgstab` may be faster.

    Args:
        ridge: a number, at least 0, that is added to the diagonal of ``Aᴴ A``; otherwise as in :func:`solve_cg`.
        init: as in :func:`solve_cg`.
        rtol: relative tolerance: stop when the residual of the normal equations, ``‖Aᴴ (b - A x)‖``, is at most
            ``max(rtol · ‖Aᴴ b‖, atol)``.
        atol: absolute tolerance; see ``rtol``.
        maxiter: as in :func:`solve_cg`.
        M: an approximate inverse of ``Aᴴ A``, or ``'jacobi'``.
        not_converged: as in :func:`solve_cg`.

    Returns:
        The solver; the residual that it reports is that of the normal equations.

    Raises:
        ValueError: a number is out of its range, or ``not_converged`` is not one of the three values.
        TypeError: ``M`` has the wrong type.
    """
    return NormalConjugateGradient(
        ridge=ridge, init=init, rtol=rtol, atol=atol, maxiter=maxiter, M=M, not_converged=not_converged
    )


@dataclass(frozen=True, kw_only=True)
class NormalConjugateGradient(ConjugateGradient):
    """The solver that :func:`solve_normal_cg` makes."""

    def solve(
        self, operator: LinearOperator, params: Tensors, b: Tensors, spec: pytree.PyTreeSpec
    ) -> tuple[Tensors, SolverInfo]:
        """Solve the normal equations."""
        right = operator.transposed().apply(params, b)
        return super().solve(NormalOperator(operator), params, right, spec)
