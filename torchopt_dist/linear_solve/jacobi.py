"""A matrix's diagonal → the preconditioner that divides by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torchopt_dist import pytree
from torchopt_dist.core.types import TensorTree

__all__ = ["jacobi"]


def jacobi(diagonal: TensorTree) -> Callable[[TensorTree], TensorTree]:
    """Make Jacobi's preconditioner from a diagonal that is known.

    Args:
        diagonal: a tree like ``b``, without zeros.

    Returns:
        A preconditioner, for the argument ``M`` of a solver.

    Example:
        >>> import torch
        >>> jacobi({"w": torch.tensor([2.0, 4.0])})({"w": torch.ones(2)})
        {'w': tensor([0.5000, 0.2500])}
    """
    return partial(_divided, diagonal)


def _divided(diagonal: TensorTree, vector: TensorTree) -> TensorTree:
    return pytree.tree_truediv(vector, diagonal)
