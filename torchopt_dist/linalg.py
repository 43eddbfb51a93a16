"""A tree of matrices, or a product with a matrix, a right-hand side → the solution, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import TensorTree
from torchopt_dist.linear_solve.cg import solve_cg
from torchopt_dist.linear_solve.neumann import solve_neumann
from torchopt_dist.linear_solve.solver import check_vector

__all__ = ["cg", "ns", "ns_inv"]


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
    product = _checked_product(A, b)
    inverse: Any = M if M is None or isinstance(M, str) else _product(M)
    return solve_cg(init=x0, rtol=rtol, atol=atol, maxiter=maxiter, M=inverse)(product, b)


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
    return solve_neumann(alpha=alpha, maxiter=maxiter)(_checked_product(A, b), b)


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
    _check_square(matrices)
    identities = [torch.eye(len(one), dtype=one.dtype, device=one.device) for one in matrices]
    return solve_neumann(alpha=alpha, maxiter=maxiter)(_product(A), pytree.unflatten(spec, identities))


def _product(A: Any) -> Callable[[TensorTree], TensorTree]:
    """The product with a tree of matrices, which are its arguments; a function as it is."""
    if callable(A) and not isinstance(A, Tensor):
        return A
    return partial(_multiplied, A)


def _multiplied(matrices: TensorTree, vectors: TensorTree) -> Any:
    return pytree.tree_map(torch.matmul, matrices, vectors)


def _checked_product(A: Any, b: TensorTree) -> Callable[[TensorTree], TensorTree]:
    leaves, spec = check_vector(b, "b")
    if isinstance(A, Tensor) or not callable(A):
        matrices = pytree.flatten_like(spec, A, "A", "b")
        _check_square(matrices)
        for matrix, leaf in zip(matrices, leaves, strict=True):
            if leaf.dim() not in (1, 2) or leaf.shape[0] != matrix.shape[0]:
                raise ValueError(
                    f"a leaf of `b` must have as many rows as its matrix, {matrix.shape[0]}, got shape "
                    f"{tuple(leaf.shape)}"
                )
    return _product(A)


def _check_square(matrices: list[Any]) -> None:
    for matrix in matrices:
        if not isinstance(matrix, Tensor):
            raise TypeError(f"`A` must be a tree of matrices or a function, got {type(matrix).__name__}")
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"a leaf of `A` must be a square matrix, got shape {tuple(matrix.shape)}")
