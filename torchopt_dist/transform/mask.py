"""A mask, the structure of the parameters → whether each leaf is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torchopt_dist import pytree
from torchopt_dist.typing import Params

__all__ = ["Mask", "choices_of"]

Mask: TypeAlias = Any | Callable[[Params], Any] | None
"""A tree of bools of the parameters' structure, a function from the parameters to one, or ``None``: all."""


def choices_of(spec: pytree.PyTreeSpec, mask: Mask, params: Params | None) -> list[bool]:
    """What a mask says of each leaf.

    Args:
        spec: the structure of the parameters.
        mask: a tree of bools, or a function from the parameters to one.
        params: the parameters, if they are known.

    Raises:
        TypeError: the mask has other leaves than bools.
        ValueError: it has another structure, or is a function and ``params`` are missing.
    """
    if callable(mask) and params is None:
        raise ValueError("`params` must be given to `update`: the mask is a function of them, got None")
    tree: Any = mask(params) if callable(mask) else mask
    try:
        choices: list[Any] = spec.flatten_up_to(tree)  # torch.compile cannot flatten a dict of bools
    except ValueError as error:
        raise ValueError(f"`mask` must have the structure of `params`, {spec}, got {tree!r:.200}") from error
    for choice in choices:
        if not isinstance(choice, bool):
            raise TypeError(f"`mask` must have bools for leaves, got {type(choice).__name__}")
    return choices
