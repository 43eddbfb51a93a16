"""A tree of tensors → its leaves and its shape, and back again; trees → their sum, their product, and so on.

``None`` is a leaf here: a gradient tree with a ``None`` in it has the structure of its parameter tree, and a
transformation can skip that leaf and keep its state.

optree's own functions (``tree_leaves``, ``tree_flatten``, ``tree_reduce``, …) are here too, with optree's
defaults: to them ``None`` is a node without leaves, unless ``none_is_leaf=True`` is given. So it is in the
arithmetic: where all trees have ``None``, so has the result, and where only some have, that is an error.
"""

from __future__ import annotations

from optree import (
    all_leaves,
    dict_insertion_ordered,
    register_pytree_node,
    register_pytree_node_class,
    tree_all,
    tree_any,
    tree_broadcast_common,
    tree_broadcast_map,
    tree_broadcast_prefix,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_iter,
    tree_leaves,
    tree_map_,
    tree_map_with_path,
    tree_max,
    tree_min,
    tree_paths,
    tree_reduce,
    tree_replace_nones,
    tree_structure,
    tree_sum,
    tree_transpose,
    tree_unflatten,
)

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
    tree_flatten_as_tuple,
    tree_map,
    unflatten,
)

__all__ = [
    "PyTreeSpec",
    "all_leaves",
    "dict_insertion_ordered",
    "flatten",
    "flatten_like",
    "is_leaf",
    "map_tensors",
    "register_pytree_node",
    "register_pytree_node_class",
    "tree_add",
    "tree_add_scalar_mul",
    "tree_all",
    "tree_any",
    "tree_as_rref",
    "tree_broadcast_common",
    "tree_broadcast_map",
    "tree_broadcast_prefix",
    "tree_flatten",
    "tree_flatten_as_tuple",
    "tree_flatten_with_path",
    "tree_is_leaf",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_map_",
    "tree_map_with_path",
    "tree_matmul",
    "tree_max",
    "tree_min",
    "tree_mul",
    "tree_neg",
    "tree_paths",
    "tree_pos",
    "tree_reduce",
    "tree_replace_nones",
    "tree_scalar_mul",
    "tree_structure",
    "tree_sub",
    "tree_sub_scalar_mul",
    "tree_sum",
    "tree_to_here",
    "tree_transpose",
    "tree_truediv",
    "tree_unflatten",
    "tree_vdot_real",
    "tree_wait",
    "unflatten",
]
