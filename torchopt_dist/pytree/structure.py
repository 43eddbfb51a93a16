"""A tree ⇄ its leaves and its structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from torchopt_dist.core.types import PyTree, TensorTree

__all__ = [
    "PyTreeSpec",
    "flatten",
    "flatten_like",
    "is_leaf",
    "map_tensors",
    "tree_map",
    "unflatten",
]

PyTreeSpec: TypeAlias = optree.PyTreeSpec
"""The structure of a tree, without its leaves."""

_BEFORE_2_13 = TorchVersion(torch.__version__) < "2.13"


def flatten(tree: PyTree[Any]) -> tuple[list[Any], PyTreeSpec]:
    """Take a tree apart into its leaves, ``None`` included, and its structure."""
    return optree.tree_flatten(tree, none_is_leaf=True)


def flatten_like(spec: PyTreeSpec, tree: PyTree[Any], name: str, like: str) -> list[Any]:
    """Take apart a tree that must have a given structure.

    A list and a tuple are the same structure.

    Args:
        spec: the structure, from :func:`flatten`.
        tree: the tree.
        name: the name of ``tree`` in the error.
        like: the name of the tree that ``spec`` is of, in the error.

    Returns:
        The leaves of ``tree``.

    Raises:
        ValueError: ``tree`` has another structure.
    """
    leaves, got = optree.tree_flatten(tree, none_is_leaf=True)
    if _differ(got, spec):
        raise ValueError(f"`{name}` must have the structure of `{like}`, {spec}, got {got}")
    return leaves


def _differ(got: PyTreeSpec, spec: PyTreeSpec) -> bool:
    """Whether two structures differ.

    A structure holds functions, and torch 2.11 cannot compile a comparison of these (2.13 can). A structure made in a
    compiled function is not equal to one that optree has made. In both cases the nodes' types and keys are compared.
    """
    if not (_BEFORE_2_13 and torch.compiler.is_compiling()) and got == spec:
        return False
    kinds = [tuple if kind is list else kind for kind in (got.type, spec.type)]
    if kinds[0] is not kinds[1] or got.entries() != spec.entries():
        return True
    return any(_differ(one, other) for one, other in zip(got.children(), spec.children(), strict=True))


def unflatten(spec: PyTreeSpec, leaves: list[Any]) -> Any:
    """Put a tree together from its structure and its leaves."""
    return optree.tree_unflatten(spec, leaves)


def tree_map(
    function: Callable[..., Any],
    tree: PyTree[Any],
    *rests: PyTree[Any],
    is_leaf: Callable[[Any], bool] | None = None,
    none_is_leaf: bool = True,
    namespace: str = "",
) -> Any:
    """Apply a function leaf by leaf, as ``optree.tree_map``, with ``None`` as a leaf."""
    return optree.tree_map(
        function, tree, *rests, is_leaf=is_leaf, none_is_leaf=none_is_leaf, namespace=namespace
    )


def map_tensors(function: Callable[[Tensor], Any], tree: TensorTree) -> Any:
    """Apply a function to each tensor of a tree; every other leaf stays as it is."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def is_leaf(tree: PyTree[Any]) -> bool:
    """Whether a tree is nothing but one leaf."""
    return optree.tree_is_leaf(tree, none_is_leaf=True)
