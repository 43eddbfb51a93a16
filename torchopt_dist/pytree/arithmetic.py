"""Trees of tensors → their sum, their product, and so on, leaf by leaf."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from numbers import Number
from typing import Any

import optree
import torch
from torch import Tensor

from torchopt_dist.core.types import Numeric, TensorTree

__all__ = [
    "tree_add",
    "tree_add_scalar_mul",
    "tree_matmul",
    "tree_mul",
    "tree_neg",
    "tree_pos",
    "tree_scalar_mul",
    "tree_sub",
    "tree_sub_scalar_mul",
    "tree_truediv",
    "tree_vdot_real",
]


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
        A tree with the structure of the first.

    Raises:
        TypeError: no tree is given.
        ValueError: a tree has another structure than the first.

    Example:
        >>> tree_add({"a": 1, "b": None}, {"a": 2, "b": None}, {"a": 3, "b": None})
        {'a': 6, 'b': None}
    """
    return _variadic(operator.add, trees)


def tree_sub(minuend_tree: TensorTree, subtrahend_tree: TensorTree) -> Any:
    """Compute ``x - y`` for each pair of leaves.

    Args:
        minuend_tree: a tree of tensors or numbers.
        subtrahend_tree: a tree of the same structure, of tensors or numbers.

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
    """Compute ``x / y`` for each pair of leaves; otherwise as :func:`tree_sub`."""
    return _combine(operator.truediv, dividend_tree=dividend_tree, divisor_tree=divisor_tree)


def tree_scalar_mul(scalar: Numeric, multiplicand_tree: TensorTree) -> Any:
    """Compute ``scalar * x`` for each leaf.

    Args:
        scalar: a number, or a tensor of one element, which may require grad.
        multiplicand_tree: a tree of tensors or numbers.

    Raises:
        TypeError: ``scalar`` is neither a number nor a tensor.
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
        tree_y: a tree of the same structure, of tensors or numbers.
        alpha: a number, or a tensor of one element, which may require grad; 1, if not given.

    Raises:
        TypeError: ``alpha`` is neither a number nor a tensor.
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

    The result is a tensor, not a ``float``, so that it can be differentiated, batched and compiled without
    synchronizing with a GPU. It can be used as a number in arithmetic.

    Args:
        tree_x: a tree of tensors or numbers; its elements are conjugated.
        tree_y: a tree of the same structure and shapes.

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
