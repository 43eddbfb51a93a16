"""A tree of tensors → its leaves and its shape, and back again; trees → their sum, their product, and so on.

``None`` is a leaf here: a gradient tree with a ``None`` in it has the structure of its parameter tree, and a
transformation can skip that leaf and keep its state.

optree's own functions (``tree_leaves``, ``tree_flatten``, ``tree_reduce``, …) are here too, with optree's
defaults: to them ``None`` is a node without leaves, unless ``none_is_leaf=True`` is given. So it is in the
arithmetic: where all trees have ``None``, so has the result, and where only some have, that is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from functools import partial, reduce
from numbers import Number
from typing import Any, TypeAlias

import optree
import torch
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
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from torchopt_dist.errors import NotInitializedError
from torchopt_dist.typing import Numeric, PyTree, RRef, TensorTree

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

PyTreeSpec: TypeAlias = optree.PyTreeSpec
"""The structure of a tree, without its leaves."""


def flatten(tree: PyTree[Any]) -> tuple[list[Any], PyTreeSpec]:
    """Take a tree apart: its leaves, ``None`` counted, and its structure."""
    return optree.tree_flatten(tree, none_is_leaf=True)


def flatten_like(spec: PyTreeSpec, tree: PyTree[Any], name: str, like: str) -> list[Any]:
    """Take apart a tree that must have a given structure.

    Args:
        spec: the structure, from :func:`flatten`.
        tree: the tree.
        name: what the caller calls ``tree``; for the error.
        like: what the caller calls the tree that ``spec`` is of; for the error.

    Returns:
        The leaves of ``tree``.

    Raises:
        ValueError: ``tree`` has another structure.
    """
    leaves, got = optree.tree_flatten(tree, none_is_leaf=True)
    if got != spec:
        raise ValueError(f"`{name}` must have the structure of `{like}`, {spec}, got {got}")
    return leaves


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
    """Apply a function leaf by leaf, ``None`` counted as a leaf; otherwise ``optree.tree_map``."""
    return optree.tree_map(
        function, tree, *rests, is_leaf=is_leaf, none_is_leaf=none_is_leaf, namespace=namespace
    )


def map_tensors(function: Callable[[Tensor], Any], tree: TensorTree) -> Any:
    """Apply a function to each tensor of a tree; every other leaf stays as it is."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def is_leaf(tree: PyTree[Any]) -> bool:
    """Whether a tree is nothing but one leaf."""
    return optree.tree_is_leaf(tree, none_is_leaf=True)


def tree_flatten_as_tuple(
    tree: TensorTree,
    is_leaf: Callable[[Any], bool] | None = None,
    *,
    none_is_leaf: bool = False,
    namespace: str = "",
) -> tuple[tuple[Any, ...], PyTreeSpec]:
    """Take a tree apart as ``optree.tree_flatten``, the leaves as a tuple.

    Example:
        >>> leaves, spec = tree_flatten_as_tuple({"a": 1, "b": (2, None)})
        >>> leaves
        (1, 2)
    """
    leaves, spec = optree.tree_flatten(tree, is_leaf, none_is_leaf=none_is_leaf, namespace=namespace)
    return tuple(leaves), spec


def tree_pos(tree: TensorTree) -> Any:
    """Compute ``+x`` for each leaf."""
    return optree.tree_map(operator.pos, tree)


def tree_neg(tree: TensorTree) -> Any:
    """Compute ``-x`` for each leaf."""
    return optree.tree_map(operator.neg, tree)


def tree_add(*trees: TensorTree) -> Any:
    """Add trees, leaf by leaf.

    Args:
        trees: one or more trees of one structure, of tensors or numbers.

    Returns:
        A tree of the structure of the first.

    Raises:
        TypeError: no tree is given.
        ValueError: one of them has another structure than the first.

    Example:
        >>> tree_add({"a": 1, "b": None}, {"a": 2, "b": None}, {"a": 3, "b": None})
        {'a': 6, 'b': None}
    """
    return _variadic(operator.add, trees)


def tree_sub(minuend_tree: TensorTree, subtrahend_tree: TensorTree) -> Any:
    """Compute ``x - y`` for each pair of leaves.

    Args:
        minuend_tree: a tree of tensors or numbers.
        subtrahend_tree: likewise, of the same structure.

    Raises:
        ValueError: the structures differ.
    """
    return _combine(operator.sub, minuend_tree=minuend_tree, subtrahend_tree=subtrahend_tree)


def tree_mul(*trees: TensorTree) -> Any:
    """Multiply trees, leaf by leaf; otherwise as :func:`tree_add`."""
    return _variadic(operator.mul, trees)


def tree_matmul(*trees: TensorTree) -> Any:
    """Multiply trees as matrices (``@``), leaf by leaf, from the left; otherwise as :func:`tree_add`."""
    return _variadic(operator.matmul, trees)


def tree_truediv(dividend_tree: TensorTree, divisor_tree: TensorTree) -> Any:
    """Compute ``x / y`` for each pair of leaves.

    Args:
        dividend_tree: a tree of tensors or numbers.
        divisor_tree: likewise, of the same structure.

    Raises:
        ValueError: the structures differ.
    """
    return _combine(operator.truediv, dividend_tree=dividend_tree, divisor_tree=divisor_tree)


def tree_scalar_mul(scalar: Numeric, multiplicand_tree: TensorTree) -> Any:
    """Compute ``scalar * x`` for each leaf.

    Args:
        scalar: a number, or a tensor of one element, which may require grad.
        multiplicand_tree: a tree of tensors or numbers.

    Raises:
        TypeError: ``scalar`` is neither.
        ValueError: ``scalar`` is a tensor of another size.

    Example:
        >>> tree_scalar_mul(2, {"a": 1.5, "b": [3, None]})
        {'a': 3.0, 'b': [6, None]}
    """
    return optree.tree_map(partial(operator.mul, _scalar("scalar", scalar)), multiplicand_tree)


def tree_add_scalar_mul(tree_x: TensorTree, tree_y: TensorTree, alpha: Numeric | None = None) -> Any:
    """Compute ``x + alpha * y`` for each pair of leaves.

    Args:
        tree_x: a tree of tensors or numbers.
        tree_y: likewise, of the same structure.
        alpha: a number, or a tensor of one element, which may require grad; 1, if not given.

    Raises:
        TypeError: ``alpha`` is neither.
        ValueError: the structures differ, or ``alpha`` is a tensor of another size.

    Example:
        >>> tree_add_scalar_mul([1, 2], [10, 20], alpha=0.5)
        [6.0, 12.0]
    """
    if alpha is None:
        return _combine(operator.add, tree_x=tree_x, tree_y=tree_y)
    return _combine(partial(_add_scaled, _scalar("alpha", alpha)), tree_x=tree_x, tree_y=tree_y)


def tree_sub_scalar_mul(tree_x: TensorTree, tree_y: TensorTree, alpha: Numeric | None = None) -> Any:
    """Compute ``x - alpha * y`` for each pair of leaves; otherwise as :func:`tree_add_scalar_mul`."""
    if alpha is None:
        return _combine(operator.sub, tree_x=tree_x, tree_y=tree_y)
    return _combine(partial(_sub_scaled, _scalar("alpha", alpha)), tree_x=tree_x, tree_y=tree_y)


def tree_vdot_real(tree_x: TensorTree, tree_y: TensorTree) -> Numeric:
    r"""The real part of the inner product of two trees, ``Re(Σ conj(x) · y)`` over all elements of all leaves.

    The result is a tensor, not a ``float``, so that it can be differentiated, batched and compiled, and no
    GPU is waited for; in arithmetic it does for a number.

    Args:
        tree_x: a tree of tensors or numbers; these are conjugated.
        tree_y: likewise, of the same structure and shapes.

    Returns:
        A tensor without dimensions on the first tensor's device; a number if there is no tensor, 0 for an
        empty tree.

    Raises:
        ValueError: the structures or the shapes of two leaves differ.

    Example:
        >>> import torch
        >>> tree_vdot_real({"a": torch.tensor([1 + 2j]), "b": 3.0}, {"a": torch.tensor([1j]), "b": 2.0})
        tensor(8.)
    """
    xs, ys, _ = _aligned({"tree_x": tree_x, "tree_y": tree_y})
    total: Numeric = 0
    for x, y in zip(xs, ys, strict=True):
        part = _vdot_real(x, y)
        if isinstance(part, Tensor) and isinstance(total, Tensor):
            part = part.to(total.device)
        total = total + part
    return total


def tree_wait(future_tree: PyTree[Any]) -> Any:
    """Wait for all futures of a tree.

    Args:
        future_tree: a tree of futures, torch's or those of ``concurrent.futures``.

    Returns:
        The tree of their values.

    Raises:
        TypeError: a leaf is no future.
        Exception: what the first future that failed has raised, once all are done.

    Example:
        >>> import torch
        >>> future = torch.futures.Future()
        >>> future.set_result(3)
        >>> tree_wait({"a": future})
        {'a': 3}
    """
    futures, spec = optree.tree_flatten(future_tree)
    for future in futures:
        if not isinstance(future, (Future, ThreadFuture)):
            raise TypeError(f"`future_tree` must be a tree of futures, got {type(future).__name__}")
    values, failures = [], []
    for future in futures:
        try:
            values.append(future.wait() if isinstance(future, Future) else future.result())
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return optree.tree_unflatten(spec, values)


def tree_as_rref(tree: TensorTree) -> Any:
    """Make a remote reference to each leaf, which other workers can fetch.

    Args:
        tree: a tree of anything.

    Returns:
        The tree of ``torch.distributed.rpc.RRef``; this process owns the values.

    Raises:
        NotInitializedError: there is no RPC group, or torch is built without RPC.
    """
    leaves, spec = optree.tree_flatten(tree)
    if not rpc.is_available():
        raise NotInitializedError("`tree_as_rref` needs RPC, which this build of torch does not have")
    try:
        references: list[Any] = [RRef(leaf) for leaf in leaves]
    except RuntimeError as error:
        raise NotInitializedError(
            "`tree_as_rref` needs an RPC group: call it inside a function decorated with `auto_init_rpc`"
        ) from error
    return optree.tree_unflatten(spec, references)


def tree_to_here(rref_tree: PyTree[Any], timeout: float = -1.0) -> Any:
    """Fetch the values of a tree of remote references.

    Args:
        rref_tree: a tree of ``torch.distributed.rpc.RRef``.
        timeout: seconds for each; 0 means for ever, and a negative number RPC's own limit.

    Returns:
        The tree of values.

    Raises:
        TypeError: a leaf is no remote reference.
    """
    references, spec = optree.tree_flatten(rref_tree)
    for reference in references:
        if not hasattr(reference, "to_here"):  # one that came from another worker is of RRef's base class
            raise TypeError(f"`rref_tree` must be a tree of RRefs, got {type(reference).__name__}")
    return optree.tree_unflatten(spec, [reference.to_here(timeout) for reference in references])


def _aligned(trees: dict[str, TensorTree]) -> tuple[Any, ...]:
    """The leaves of each tree, and the structure of the first, which the others must have."""
    (first, tree), *others = trees.items()
    leaves, spec = optree.tree_flatten(tree)
    columns = [leaves]
    for name, other in others:
        try:
            column = spec.flatten_up_to(other)  # a dict will do for an OrderedDict
            if not optree.all_leaves(column):
                raise ValueError("a tree stands in place of a leaf")
        except ValueError as error:
            got = optree.tree_structure(other)
            raise ValueError(f"`{name}` must have the structure of `{first}`, {spec}, got {got}") from error
        columns.append(column)
    return *columns, spec


def _combine(function: Callable[[Any, Any], Any], **trees: TensorTree) -> Any:
    *columns, spec = _aligned(trees)
    return optree.tree_unflatten(spec, [reduce(function, row) for row in zip(*columns, strict=True)])


def _variadic(function: Callable[[Any, Any], Any], trees: tuple[TensorTree, ...]) -> Any:
    if not trees:
        raise TypeError("`trees` must be one tree or more, got none")
    return _combine(function, **{f"trees[{place}]": tree for place, tree in enumerate(trees)})


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"`{name}` as a tensor must have one element, got shape {tuple(value.shape)}")
        return value.reshape(())
    if not isinstance(value, Number):
        raise TypeError(f"`{name}` must be a number or a tensor of one element, got {type(value).__name__}")
    return value


def _add_scaled(alpha: Any, x: Any, y: Any) -> Any:
    return x + alpha * y


def _sub_scaled(alpha: Any, x: Any, y: Any) -> Any:
    return x - alpha * y


def _vdot_real(x: Any, y: Any) -> Any:
    left, right = (tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in (x, y))
    if left != right:
        raise ValueError(f"leaves of `tree_x` and `tree_y` must have equal shapes, got {left} and {right}")
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        dtype = torch.promote_types(x.dtype, y.dtype)
        return torch.vdot(x.reshape(-1).to(dtype), y.reshape(-1).to(x.device, dtype)).real
    return (x.conj() * y if isinstance(x, Tensor) else y * x.conjugate()).real
