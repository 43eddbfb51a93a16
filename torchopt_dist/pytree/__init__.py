"""A tree of tensors ⇄ its leaves and its structure; trees → their sum, their product, and other arithmetic.

For ``flatten``, ``tree_map`` and similar functions ``None`` is a leaf: a gradient tree with a ``None`` in it has the
structure of its parameter tree, and a transformation can skip that leaf and keep its state.

For the arithmetic, as for optree's own functions, ``None`` is a node without leaves: where all trees have ``None``, the
result has it, too; where only some have it, an error is raised.
"""

from __future__ import annotations

from torchopt_dist.pytree.arithmetic import (
    tree_add,
    tree_add_scalar_mul,
    tree_matmul,
    tree_mul,
    tree_neg,
    tree_pos,
    tree_scalar_mul,
    tree_sub,
    tree_sub_scalar_mul,
    tree_truediv,
    tree_vdot_real,
)
from torchopt_dist.pytree.futures import (
    tree_as_rref,
    tree_to_here,
    tree_wait,
)
from torchopt_dist.pytree.structure import (
    PyTreeSpec,
    flatten,
    flatten_like,
    is_leaf,
    map_tensors,
    tree_map,
    unflatten,
)

__all__ = [
    "PyTreeSpec",
    "flatten",
    "flatten_like",
    "is_leaf",
    "map_tensors",
    "tree_add",
    "tree_add_scalar_mul",
    "tree_as_rref",
    "tree_map",
    "tree_matmul",
    "tree_mul",
    "tree_neg",
    "tree_pos",
    "tree_scalar_mul",
    "tree_sub",
    "tree_sub_scalar_mul",
    "tree_to_here",
    "tree_truediv",
    "tree_vdot_real",
    "tree_wait",
    "unflatten",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
