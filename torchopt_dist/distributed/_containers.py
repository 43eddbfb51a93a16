"""Arguments → their leaves, and a function that replaces them by others, also in containers that are not trees.

For ``optree`` an object of a subclass of ``dict`` or ``list``, a ``UserDict`` or a dataclass is one leaf. Batches and
outputs of models are such objects in many libraries.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from typing import Any, NamedTuple, TypeAlias

import optree
from torch import Tensor, nn

__all__ = ["Flat", "flatten", "tensors_hidden_in"]

_Rebuild: TypeAlias = Callable[[Iterator[Any]], Any]


class Flat(NamedTuple):
    """A tree that has been taken apart."""

    leaves: list[Any]
    """The leaves, ``None`` counted."""
    paths: list[str]
    """The expression of each leaf."""
    rebuild: _Rebuild
    """Makes a tree of other leaves, of copies of its containers."""


def flatten(
    tree: Any, *, is_leaf: Callable[[Any], bool], path: str = "", inside: tuple[Any, ...] = ()
) -> Flat:
    """Take a tree apart; a container without tensors stays whole.

    Args:
        tree: nodes that ``optree`` knows, mappings and sequences that can be changed, dataclasses.
        is_leaf: whether an object is a leaf that counts as a tensor, and is not taken apart.
        path: the expression of the tree itself, for errors.
        inside: the containers around it; a container inside itself is a leaf.
    """
    node: Any = tree
    accessors, nodes, spec = optree.tree_flatten_with_accessor(node, is_leaf=is_leaf, none_is_leaf=True)
    leaves: list[Any] = []
    paths: list[str] = []
    rebuilds: list[_Rebuild] = []
    for accessor, leaf in zip(accessors, nodes, strict=True):
        where = accessor.codify(path)
        found = None
        if not (is_leaf(leaf) or any(leaf is outer for outer in inside)):
            found = _opened(leaf, is_leaf, where, inside)
        found = found or Flat([leaf], [where], next)
        leaves += found.leaves
        paths += found.paths
        rebuilds.append(found.rebuild)
    return Flat(
        leaves, paths, lambda new: optree.tree_unflatten(spec, [rebuild(new) for rebuild in rebuilds])
    )


def _opened(
    container: Any, is_leaf: Callable[[Any], bool], path: str, inside: tuple[Any, ...]
) -> Flat | None:
    put: Callable[[Any, Any, Any], None]
    if isinstance(container, (Tensor, nn.Module, str, int, float, type)):
        return None
    if isinstance(container, (MutableMapping, MutableSequence)) and len(container):
        keys: Iterable[Any] = (
            list(container) if isinstance(container, MutableMapping) else range(len(container))
        )
        items = [(key, f"{path}[{key!r}]", container[key]) for key in keys]
        put = type(container).__setitem__
    elif dataclasses.is_dataclass(container):
        names: list[Any] = [
            field.name for field in dataclasses.fields(container) if hasattr(container, field.name)
        ]
        items = [(name, f"{path}.{name}", getattr(container, name)) for name in names]
        put = _set_field
    else:
        return None
    parts = [
        flatten(value, is_leaf=is_leaf, path=where, inside=(*inside, container)) for _, where, value in items
    ]
    if not any(isinstance(leaf, Tensor) or is_leaf(leaf) for part in parts for leaf in part.leaves):
        return None

    def rebuild(new: Iterator[Any]) -> Any:
        rebuilt = copy.copy(container)
        for (key, _, _), part in zip(items, parts, strict=True):
            put(rebuilt, key, part.rebuild(new))
        return rebuilt

    return Flat(
        [leaf for part in parts for leaf in part.leaves],
        [where for part in parts for where in part.paths],
        rebuild,
    )


def _set_field(instance: Any, name: str, value: Any) -> None:
    object.__setattr__(instance, name, value)  # also if it is frozen


def tensors_hidden_in(leaf: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with their names, among the attributes of an object that is not a container, and in trees there."""
    for name, value in getattr(leaf, "__dict__", {}).items():
        tree: Any = value
        accessors, parts, _ = optree.tree_flatten_with_accessor(tree, none_is_leaf=True)
        for accessor, part in zip(accessors, parts, strict=True):
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                yield accessor.codify(f".{name}"), part
