"""A state, the parameters' dtypes then and now → the state in the dtypes of a new state.

Converting a module, by ``module.double()`` for example, does not convert the state of its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import optree
import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.optim._checkpoint import flatten_with_keys, key_of

__all__ = ["Dtypes", "converted", "dtypes_of", "fitted", "have_same_dtypes"]

Leaf = TypeVar("Leaf")
Dtypes: TypeAlias = tuple[torch.dtype | None, ...]


def dtypes_of(params: Iterable[OptionalTensor]) -> Dtypes:
    """The dtypes of parameters, in their order."""
    return tuple([None if p is None else p.dtype for p in params])


def have_same_dtypes(state: OptState | None, other: OptState | None) -> bool:
    """Whether two states of one structure have the same dtypes; not if one is missing."""
    if state is None or other is None:
        return False
    return dtypes_of(pytree.flatten(state)[0]) == dtypes_of(pytree.flatten(other)[0])


def fitted(state: OptState, begin: Callable[[], OptState], before: Dtypes | None, now: Dtypes) -> OptState:
    """The state itself, or, where the parameters' dtypes have changed, one of converted tensors, connected to it.

    Args:
        state: the state.
        begin: makes a new state of the parameters, of which only the dtypes are used.
        before: the parameters' dtypes for which the state was made; ``None`` if they are unknown.
        now: their dtypes now.

    Raises:
        ValueError: a real parameter has become a complex one, or the other way round.
    """
    if before == now:
        return state
    likes = dict(zip(*flatten_with_keys(begin())[:2], strict=True))
    paths, leaves, spec = flatten_with_keys(state)
    return optree.tree_unflatten(
        spec,
        [converted(leaf, likes.get(path), key_of(path)) for path, leaf in zip(paths, leaves, strict=True)],
    )


def converted(leaf: Leaf, like: object, where: str) -> Leaf | Tensor:
    """A leaf of a state in the dtype of another one, if both are tensors.

    Args:
        leaf: the leaf.
        like: the leaf with the dtype.
        where: the name of the leaf, for the error.

    Raises:
        ValueError: one of the two is complex, and the other is not.
    """
    if not isinstance(leaf, Tensor) or not isinstance(like, Tensor) or leaf.dtype == like.dtype:
        return leaf
    if leaf.is_complex() != like.is_complex():
        raise ValueError(
            f"`params` must stay real or complex: {where} has {leaf.dtype}, and the parameter needs {like.dtype} now; "
            "make a new optimizer"
        )
    return leaf.to(like.dtype)
