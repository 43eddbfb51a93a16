"""A tree of matrices, or a function → an operator and its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import TensorTree
from torchopt_dist.core.vjp import Tensors
from torchopt_dist.linear_solve._closure import convert
from torchopt_dist.linear_solve._operator import LinearOperator

__all__ = ["MatrixOperator", "as_operator", "check_square", "inverse_or_function"]


@dataclass(frozen=True)
class MatrixOperator(LinearOperator):
    """Each leaf of the vector is multiplied by a matrix of its own; these are the parameters."""

    adjoint: bool = False

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        """Multiply, differentiably."""
        return [(matrix.mH if self.adjoint else matrix) @ v for matrix, v in zip(params, vector, strict=True)]

    def transposed(self) -> LinearOperator:
        """The operator of the transposed matrix."""
        return MatrixOperator(not self.adjoint)


def as_operator(
    A: TensorTree | Callable[[TensorTree], TensorTree], b: TensorTree
) -> tuple[LinearOperator, Tensors, Tensors, pytree.PyTreeSpec]:
    """The operator of ``A``, its parameters, and the leaves and the structure of ``b``.

    Raises:
        TypeError: a leaf of ``A`` or ``b`` is not a tensor.
        ValueError: ``A`` has another structure than ``b``, or a leaf of it is not a square matrix that fits.
    """
    leaves, spec = pytree.flatten(b)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"`b` must be a tree of floating-point tensors, got a leaf of {got}")
    if callable(A) and not isinstance(A, Tensor):
        return *convert(A, spec, leaves), leaves, spec
    matrices = pytree.flatten_like(spec, A, "A", "b")
    check_square(matrices)
    for matrix, leaf in zip(matrices, leaves, strict=True):
        if leaf.dim() not in (1, 2) or leaf.shape[0] != matrix.shape[0]:
            raise ValueError(
                f"a leaf of `b` must have as many rows as its matrix, {matrix.shape[0]}, got shape {tuple(leaf.shape)}"
            )
    return MatrixOperator(), matrices, leaves, spec


def check_square(matrices: list[Any]) -> None:
    """Demand square matrices.

    Raises:
        TypeError: one is not a tensor.
        ValueError: one is not square.
    """
    for matrix in matrices:
        if not isinstance(matrix, Tensor):
            raise TypeError(f"`A` must be a tree of matrices or a function, got {type(matrix).__name__}")
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"a leaf of `A` must be a square matrix, got shape {tuple(matrix.shape)}")


def inverse_or_function(
    M: TensorTree | Callable[[TensorTree], TensorTree] | str | None,
) -> Any:
    """The preconditioner for a solver; a tree of matrices is multiplied leaf by leaf."""
    if M is None or isinstance(M, str) or (callable(M) and not isinstance(M, Tensor)):
        return M
    return lambda vector: pytree.tree_map(torch.matmul, M, vector)
