"""The tasks of a share that run in one ``vmap`` → one task, whose tensors hold them all; and back, for their values.

Tasks that are the rows of a batch are sent as what they were: each tensor of a message costs some time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from torchopt_dist.core.types import Args, KwArgs
from torchopt_dist.pytree._containers import Flat, flatten

__all__ = ["Rows", "Stacked", "split_values", "stacked", "taken_apart"]

_PLAIN = (nn.Module, str, bytes, int, float, complex, type(None))


class Stacked(NamedTuple):
    """One task that stands for several.

    Attributes:
        task: its arguments.
        places: of its leaves that hold a task's at each index of dimension 0.
    """

    task: tuple[Args, KwArgs]
    places: tuple[int, ...]


class Rows(NamedTuple):
    """A batch whose indices along a dimension are tasks."""

    leaves: list[Any]
    places: list[int]
    """Of the leaves that are split."""
    dim: int
    rebuild: Callable[[Iterator[Any]], Any]
    """Leaves → ``(args, kwargs)``."""

    def are_plain(self) -> bool:
        """Whether workers receive all leaves as they are: a handle becomes a value there, which may have leaves."""
        return all(
            not leaf.is_inference() if isinstance(leaf, Tensor) else isinstance(leaf, _PLAIN)
            for leaf in self.leaves
        )

    def task(self, index: int) -> tuple[Args, KwArgs]:
        """The task with this index."""
        leaves = list(self.leaves)
        for place in self.places:
            leaves[place] = leaves[place].select(self.dim, index)
        task: tuple[Args, KwArgs] = self.rebuild(iter(leaves))
        return task

    def between(self, start: int, stop: int) -> Stacked:
        """The tasks with these indices."""
        leaves = list(self.leaves)
        for place in self.places:
            leaves[place] = leaves[place].narrow(self.dim, start, stop - start).movedim(self.dim, 0)
        return Stacked(self.rebuild(iter(leaves)), tuple(self.places))


def taken_apart(task: tuple[Args, KwArgs]) -> Flat:
    """The leaves of a task's arguments."""
    return flatten(task, is_leaf=lambda leaf: isinstance(leaf, nn.Module))


def stacked(tasks: Sequence[tuple[Args, KwArgs]]) -> Stacked | None:
    """One task for all of them, in which what they share is there once; ``None`` if they do not differ.

    Raises :class:`TypeError` if something else than a tensor differs, and :class:`ValueError` if shapes do.
    """
    flat = [taken_apart(task) for task in tasks]
    columns = list(zip(*(each.leaves for each in flat), strict=True))
    places = tuple(
        place for place, column in enumerate(columns) if not all(_same(leaf, column[0]) for leaf in column)
    )
    if not places:
        return None
    _check_mappable(columns, places, flat[0])
    leaves = [column[0] for column in columns]
    for place in places:
        leaves[place] = torch.stack(columns[place])
    return Stacked(flat[0].rebuild(iter(leaves)), places)


def split_values(batched: Any, number: int) -> list[Any]:
    """The value of each task, from a tree of what all have at dimension 0."""
    leaves, spec = optree.tree_flatten(batched, none_is_leaf=True)
    if not leaves:
        return [batched] * number
    unbind_copy: Any = torch.unbind_copy  # by its stub in torch it returns None
    columns = zip(*map(unbind_copy, leaves), strict=True)
    return [optree.tree_unflatten(spec, column) for column in columns]


def _same(leaf: Any, other: Any) -> bool:
    if leaf is other or isinstance(leaf, Tensor) or isinstance(other, Tensor):
        return leaf is other
    try:
        # `True == 1`, and the two are different arguments.
        return type(leaf) is type(other) and bool(leaf == other)
    except (ValueError, RuntimeError):  # arrays, which have no one truth value
        return False


def _check_mappable(columns: Sequence[tuple[Any, ...]], places: Iterable[int], first: Flat) -> None:
    for place in places:
        column = columns[place]
        if not all(isinstance(leaf, Tensor) for leaf in column):
            raise TypeError(
                f"vectorize=True maps over tensors, but {first.paths('(args, kwargs)')[place]} differs between tasks "
                f"and is {type(column[0]).__name__}"
            )
        if len({leaf.shape for leaf in column}) > 1:
            raise ValueError(
                f"vectorize=True needs tasks of one shape, but {first.paths('(args, kwargs)')[place]} has shapes "
                f"{sorted({tuple(leaf.shape) for leaf in column})}: split with exclusive=True, "
                "or leave vectorize=True out"
            )
