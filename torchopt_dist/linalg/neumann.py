"""A matrix near the identity → its inverse, or a solution, by the Neumann series, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchopt_dist import pytree
from torchopt_dist.core.types import TensorTree
from torchopt_dist.linalg._matrix import MatrixOperator, as_operator, check_square
from torchopt_dist.linear_solve.neumann import solve_neumann

__all__ = ["ns", "ns_inv"]


def ns(
    A: TensorTree | Callable[[TensorTree], TensorTree],
    b: TensorTree,
    maxiter: int | None = None,
    *,
    alpha: float | None = None,
) -> Any:
    """Solve ``A x = b`` by the Neumann series ``alpha · Σ (I - alpha · A)ⁱ b``.

    The gradients are those of ``A⁻¹ b``, taken by the same series.

    Args:
        A: as in :func:`cg`; all eigenvalues of ``I - alpha · A`` must be inside the unit circle.
        b: a tree of tensors.
        maxiter: the highest power; 1000, if not given. The series also ends where its residual is below 1e-5 of ``b``.
        alpha: the factor; 1, if not given.

    Returns:
        The solution, a tree like ``b``.

    Raises:
        torch.linalg.LinAlgError: the series diverges.
        TypeError: an argument has the wrong type.
        ValueError: structures or shapes do not fit.
    """
    operator, params, leaves, spec = as_operator(A, b)
    solver = solve_neumann(alpha=alpha, maxiter=maxiter)
    return pytree.unflatten(spec, solver.solve(operator, params, leaves, spec)[0])


def ns_inv(A: TensorTree, maxiter: int | None = None, *, alpha: float | None = None) -> Any:
    """Invert matrices by the Neumann series ``alpha · Σ (I - alpha · A)ⁱ``; ``ns_inv(A) @ b`` is ``ns(A, b)``.

    Args:
        A: a tree of square matrices; each is inverted by itself.
        maxiter: as in :func:`ns`.
        alpha: as in :func:`ns`.

    Returns:
        The inverses, a tree like ``A``.

    Raises:
        torch.linalg.LinAlgError: the series diverges.
        TypeError: a leaf is not a tensor.
        ValueError: a leaf is not a square matrix.
    """
    matrices, spec = pytree.flatten(A)
    check_square(matrices)
    solver = solve_neumann(alpha=alpha, maxiter=maxiter)
    identities = [torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device) for matrix in matrices]
    inverses, _ = solver.solve(MatrixOperator(), matrices, identities, spec)
    return pytree.unflatten(spec, inverses)
