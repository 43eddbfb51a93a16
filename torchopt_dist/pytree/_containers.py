"""Arguments → their leaves, and a function that replaces them by others, also in containers that are not trees.

For ``optree`` an object of a subclass of ``dict`` or ``list``, a ``UserDict`` or a dataclass is one leaf. Batches and
outputs of models are such objects in many libraries.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree
from torch import Tensor, nn

__all__ = ["Flat", "flatten", "lists_beside", "tensors_hidden_in"]

_Rebuild: TypeAlias = Callable[[Iterator[Any]], Any]


class Flat(NamedTuple):
    """A tree that has been taken apart."""

    leaves: list[Any]
    """The leaves, ``None`` counted."""
    paths: Callable[[str], list[str]]
    """The expression of the tree itself → that of each leaf."""
    rebuild: _Rebuild
    """Makes a tree of other leaves, of copies of its containers."""


def flatten(tree: Any, *, is_leaf: Callable[[Any], bool], inside: tuple[Any, ...] = ()) -> Flat:
    """Take a tree apart; a container without tensors stays whole.

    Args:
        tree: nodes that ``optree`` knows, mappings and sequences that can be changed, dataclasses.
        is_leaf: whether an object is a leaf that counts as a tensor, and is not taken apart.
        inside: the containers around it; a container inside itself is a leaf.
    """
    node: Any = tree
    nodes, spec = optree.tree_flatten(node, is_leaf=is_leaf, none_is_leaf=True)
    parts = [
        None
        if is_leaf(leaf) or (inside and any(leaf is outer for outer in inside))
        else _opened(leaf, is_leaf, inside)
        for leaf in nodes
    ]

    def paths(path: str) -> list[str]:
        places = [accessor.codify(path) for accessor in spec.accessors()]
        found = zip(places, parts, strict=True)
        return [where for place, part in found for where in ([place] if part is None else part.paths(place))]

    if not any(parts):
        return Flat(nodes, paths, lambda new: optree.tree_unflatten(spec, islice(new, len(nodes))))
    leaves = [
        leaf
        for node, part in zip(nodes, parts, strict=True)
        for leaf in ([node] if part is None else part.leaves)
    ]

    def rebuild(new: Iterator[Any]) -> Any:
        return optree.tree_unflatten(
            spec, [next(new) if part is None else part.rebuild(new) for part in parts]
        )

    return Flat(leaves, paths, rebuild)


def _opened(container: Any, is_leaf: Callable[[Any], bool], inside: tuple[Any, ...]) -> Flat | None:
    put: Callable[[Any, Any, Any], None]
    if isinstance(container, (Tensor, nn.Module, str, int, float, type)):
        return None
    if isinstance(container, (MutableMapping, MutableSequence)) and len(container):
        keys: Iterable[Any] = (
            list(container) if isinstance(container, MutableMapping) else range(len(container))
        )
        items = [(key, f"[{key!r}]", container[key]) for key in keys]
        put = type(container).__setitem__
    elif dataclasses.is_dataclass(container):
        names: list[Any] = [
            field.name for field in dataclasses.fields(container) if hasattr(container, field.name)
        ]
        items = [(name, f".{name}", getattr(container, name)) for name in names]
        put = _set_field
    else:
        return None
    parts = [flatten(value, is_leaf=is_leaf, inside=(*inside, container)) for _, _, value in items]
    if not any(isinstance(leaf, Tensor) or is_leaf(leaf) for part in parts for leaf in part.leaves):
        return None

    def paths(path: str) -> list[str]:
        found = zip(items, parts, strict=True)
        return [where for (_, suffix, _), part in found for where in part.paths(path + suffix)]

    def rebuild(new: Iterator[Any]) -> Any:
        rebuilt = copy.copy(container)
        for (key, _, _), part in zip(items, parts, strict=True):
            put(rebuilt, key, part.rebuild(new))
        return rebuilt

    return Flat([leaf for part in parts for leaf in part.leaves], paths, rebuild)


def _set_field(instance: Any, name: str, value: Any) -> None:
    object.__setattr__(instance, name, value)  # also if it is frozen


def tensors_hidden_in(leaf: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and arrays, with their names, among the attributes of an object, and in trees there.

    The object is one that is not a container. An array of another library, such as a column of pandas, has no name.
    """
    if hasattr(leaf, "__array__") and isinstance(getattr(leaf, "ndim", None), int):
        yield "", leaf
    for name, value in getattr(leaf, "__dict__", {}).items():
        tree: Any = value
        accessors, parts, _ = optree.tree_flatten_with_accessor(tree, none_is_leaf=True)
        for accessor, part in zip(accessors, parts, strict=True):
            if isinstance(part, (Tensor, np.ndarray)) and not isinstance(part, nn.Parameter):
                yield accessor.codify(f".{name}"), part


def lists_beside(arguments: tuple[Any, Any], is_split: Callable[[Any], bool], size: int) -> list[str]:
    """The paths of lists among arguments that may be a part of the batch.

    Such a list holds numbers or texts, or containers of these, and is an argument itself or in one that is split. A
    tuple, as of two rates, is not taken for a batch, and neither is a list among settings.

    Args:
        arguments: ``(args, kwargs)``.
        is_split: whether a leaf is split.
        size: the length of the lists.
    """

    def is_leaf(leaf: Any) -> bool:
        return isinstance(leaf, nn.Module) or (type(leaf) is list and len(leaf) == size and _is_plain(leaf))

    leaves, paths_in, _ = flatten(arguments, is_leaf=is_leaf)
    paths = paths_in("")
    found = [path for leaf, path in zip(leaves, paths, strict=True) if type(leaf) is list]
    split = (
        {_top(path) for leaf, path in zip(leaves, paths, strict=True) if is_split(leaf)} if found else set()
    )
    return [path for path in found if _top(path) in {path, *split}]


def _top(path: str) -> str:
    """``[0][1]`` of ``[0][1]['x']``, a path in ``(args, kwargs)``: that of the argument."""
    return path[: path.index("]", 3) + 1]


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else isinstance(value, _ITEMS)


_ITEMS = (str, bytes, int, float, complex, np.generic)
