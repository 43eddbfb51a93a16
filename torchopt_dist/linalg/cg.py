"""A matrix or a product with it, a right-hand side → the solution by conjugate gradients, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchopt_dist import pytree
from torchopt_dist.core.types import TensorTree
from torchopt_dist.linalg._matrix import as_operator, inverse_or_function
from torchopt_dist.linear_solve.cg import solve_cg

__all__ = ["cg"]


def cg(
    A: TensorTree | Callable[[TensorTree], TensorTree],
    b: TensorTree,
    x0: TensorTree = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: TensorTree | Callable[[TensorTree], TensorTree] | str | None = None,
) -> Any:
    """Solve ``A x = b`` for a symmetric positive definite ``A``.

    The gradients are those of the solution, ``A⁻¹ b``, not of the iterations; to any order, under ``torch.func`` too.

    Args:
        A: a tree of square matrices, one for each leaf of ``b``; or the product with the matrix, a function from tree
            to tree, as :func:`torchopt_dist.linear_solve.solve_cg` takes it.
        b: a tree of tensors.
        x0: where to start, a tree like ``b``; zeros, if not given.
        rtol: relative tolerance: stop when ``‖b - A x‖`` is at most ``max(rtol · ‖b‖, atol)``.
        atol: absolute tolerance; see ``rtol``.
        maxiter: the largest number of iterations; 10 times the number of elements, if not given.
        M: an approximate inverse of ``A``: a tree of matrices, a function, or ``'jacobi'``.

    Returns:
        The solution, a tree like ``b``.

    Raises:
        torch.linalg.LinAlgError: ``A`` is not positive definite.
        TypeError: an argument has the wrong type.
        ValueError: structures or shapes do not fit.

    Example:
        >>> import torch
        >>> A = torch.tensor([[2.0]], requires_grad=True)
        >>> x = cg(A, torch.tensor([6.0]))
        >>> x.item(), torch.autograd.grad(x, A)[0].item()  # -6 / 2²
        (3.0, -1.5)
    """
    operator, params, leaves, spec = as_operator(A, b)
    solver = solve_cg(init=x0, rtol=rtol, atol=atol, maxiter=maxiter, M=inverse_or_function(M))
    return pytree.unflatten(spec, solver.solve(operator, params, leaves, spec)[0])
