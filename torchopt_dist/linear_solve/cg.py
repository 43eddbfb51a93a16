"""A symmetric positive definite system, or any by its normal equations → its solution, by conjugate gradients.

Hestenes and Stiefel, "Methods of conjugate gradients for solving linear systems", 1952.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import Numeric, TensorTree
from torchopt_dist.core.vjp import Tensors
from torchopt_dist.linear_solve._operator import LinearOperator, NormalOperator
from torchopt_dist.linear_solve.solver import (
    KrylovOptions,
    NotConverged,
    Outcome,
    Preconditioner,
    Solver,
    SolverInfo,
    System,
)

__all__ = ["ConjugateGradient", "NormalConjugateGradient", "solve_cg", "solve_normal_cg"]


def solve_cg(
    *,
    ridge: Numeric | None = None,
    init: TensorTree = None,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Preconditioner = None,
    not_converged: NotConverged = "warn",
) -> Solver:
    """Conjugate gradients, for symmetric (Hermitian) positive definite matrices: one product per iteration.

    Args:
        ridge: a number, at least 0, that is added to the matrix's diagonal. A tensor of one element may require grad.
        init: where to start, a tree like ``b``; zeros, if not given.
        rtol: relative tolerance: stop when ``‖b - A x‖`` is at most ``max(rtol · ‖b‖, atol)``.
        atol: absolute tolerance; see ``rtol``.
        maxiter: the largest number of iterations; 10 times the number of elements, if not given.
        M: the preconditioner, an approximate inverse of the matrix, symmetric positive definite: a function of a tree;
            or ``'jacobi'``, the inverse of the diagonal, which takes as many products as there are elements (if you
            know the diagonal, :func:`jacobi` takes none).
        not_converged: what to do if the solution is not within the tolerance, but better than zeros: ``'warn'`` with a
            :class:`ConvergenceWarning`, ``'raise'`` a ``torch.linalg.LinAlgError``, or ``'ignore'`` it.

    Returns:
        The solver: ``solver(matvec, b)``, ``solver.with_info(matvec, b)``.

    Raises:
        ValueError: a number is out of its range, or ``not_converged`` is not one of the three values.
        TypeError: ``M`` has the wrong type.

    Example:
        >>> import torch
        >>> matrix, b = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([3.0, 5.0])
        >>> x, info = solve_cg().with_info(lambda v: matrix @ v, b)
        >>> x, int(info.iterations)
        (tensor([0.8000, 1.4000]), 2)
    """
    return ConjugateGradient(
        ridge=ridge, init=init, rtol=rtol, atol=atol, maxiter=maxiter, M=M, not_converged=not_converged
    )


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient(Solver):
    """The solver that :func:`solve_cg` makes."""

    symmetric = True

    def run(self, system: System) -> Outcome:
        """Solve a batch of systems."""
        x = torch.zeros_like(system.b) if system.start is None else system.start.clone()
        r = system.b.clone() if system.start is None else system.b - system.product(x)
        precondition = system.precondition
        z = r if precondition is None else precondition(r)
        p = z.clone()
        rz = dot(r, z)
        norm = r.norm(dim=-1)
        # The square of p's length, in the preconditioner's norm, and the largest curvature of a unit vector so far.
        length, steepest = rz, torch.zeros_like(rz)
        rounding = torch.finfo(norm.dtype).eps
        iterations = torch.zeros(norm.shape, device=norm.device)
        failure = ""
        for _ in range(system.maxiter):
            active = ~(norm <= system.tolerance)  # a nan is no success
            if not bool(active.any()):
                break
            product = system.product(p)
            curvature = dot(p, product)
            steepest = torch.maximum(steepest, curvature / length)
            # Below this all digits of the curvature are rounding errors: p is as good as in the null space.
            broken = active & ~(curvature > rounding * steepest * length)
            if bool(broken.any()):
                failure = (
                    "conjugate gradients need a symmetric positive definite matrix, and met a direction p with "
                    f"pᵀ A p = {float(curvature[broken].min()):.3g} (that of a loss's second derivatives is none "
                    "where the loss has no minimum: take more steps, and write a weight decay into the loss)"
                )
                break
            alpha = torch.where(active, rz / curvature, 0)
            add_scaled_(x, p, alpha)
            add_scaled_(r, product, -alpha)
            z = r if precondition is None else precondition(r)
            rz, previous = dot(r, z), rz
            norm = rz.sqrt() if precondition is None else r.norm(dim=-1)
            beta = torch.where(active, rz / previous, 0)
            length = rz + beta.square() * length
            p = (
                torch.add(z, p, alpha=float(beta))
                if p.dim() == 1
                else torch.addcmul(z, p, beta.unsqueeze(-1))
            )
            iterations += active
        return Outcome(x, norm, iterations, failure)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """The real part of the inner product of vectors of shape (…, n)."""
    if x.dim() == 1:
        return torch.vdot(x, y).real
    return torch.linalg.vecdot(x, y).real


def add_scaled_(x: Tensor, y: Tensor, factor: Tensor) -> None:
    """``x += factor · y``, for vectors of shape (…, n) and factors of shape (…); a number is faster than a tensor."""
    if x.dim() == 1:
        x.add_(y, alpha=float(factor))
    else:
        x.addcmul_(y, factor.unsqueeze(-1))


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
