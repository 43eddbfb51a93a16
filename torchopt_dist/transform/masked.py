"""A transformation, a mask → the transformation at the leaves that the mask chooses; the others pass through."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.pytree._name_patterns import check_patterns, first_match
from torchopt_dist.transform.base import GradientTransformation, no_transformation, of_elements

__all__ = ["Mask", "MaskedState", "choices_of", "masked"]

Mask: TypeAlias = Any | Callable[[Params], Any] | None
"""A tree of bools of the parameters' structure, a function from the parameters to one, a pattern of names such as
``"*.weight"`` or a list of patterns, or ``None``: all."""


class MaskedState(NamedTuple):
    """The state of :func:`masked`."""

    inner_state: OptState
    """The state of the inner transformation, ``None`` at the leaves that the mask does not choose."""


def masked(inner: GradientTransformation, mask: Mask = None) -> GradientTransformation:
    """Apply a transformation to some leaves only.

    For all other leaves ``inner`` is given ``None``: it keeps no state for them, and their updates pass through as they
    are. A transformation that combines all updates, as :func:`clip_grad_norm` does in its norm, then
    combines the chosen ones only.

    Args:
        inner: the transformation.
        mask: which leaves ``inner`` transforms: a pattern of names, such as ``"*.weight"``, or a list of patterns, one
            of which must match (``*`` stands for any characters, ``?`` for one, ``[ab]`` for one of these); a tree of
            bools of the parameters' structure; or a function from the parameters to such a tree (defined at module
            level, if the transformation is to be pickled). The function runs in ``init`` and in each ``update``, so
            its answer must stay the same: it may look at names and shapes, not at values. All, if not given.

    Raises:
        TypeError: ``inner`` is not a gradient transformation; from ``init`` and ``update``, the mask has other
            leaves than bools.
        ValueError: from ``init`` and ``update``: the mask has another structure, or is a function and
            ``params`` are missing; a pattern matches no name.

    Example:
        >>> import torch
        >>> from torchopt_dist.transform.scale import scale
        >>> init, update = masked(scale(10.0), {"w": True, "b": False})
        >>> gradients = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> update(gradients, init(gradients))[0]
        {'w': tensor([10.]), 'b': tensor([1.])}
        >>> init, update = masked(scale(10.0), "w*")
        >>> update(gradients, init(gradients))[0]
        {'w': tensor([10.]), 'b': tensor([1.])}
    """
    if not isinstance(inner, GradientTransformation):
        raise no_transformation("inner", inner)
    if mask is None:
        return inner
    return GradientTransformation(partial(_init, inner, mask), partial(_update, inner, mask))


def _init(inner: GradientTransformation, mask: Mask, params: Params, /) -> MaskedState:
    leaves, spec = pytree.flatten(params)
    return MaskedState(inner.init(_hide(leaves, choices_of(spec, mask, params), spec)))


@of_elements(masks=True)
def _update(
    inner: GradientTransformation,
    mask: Mask,
    updates: Updates,
    state: MaskedState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, MaskedState):
        raise TypeError(f"`state` must be a MaskedState, got {type(state).__name__}")
    leaves, spec = pytree.flatten(updates)
    if params is not None:
        pytree.flatten_like(spec, params, "params", "updates")
    choices = choices_of(spec, mask, params)
    moved, inner_state = inner.update(
        _hide(leaves, choices, spec), state.inner_state, params=params, inplace=inplace
    )
    seen = pytree.flatten_like(spec, moved, "the updates that `inner` made", "updates")
    merged = [new if choice else old for new, old, choice in zip(seen, leaves, choices, strict=True)]
    return pytree.unflatten(spec, merged), MaskedState(inner_state)


def _hide(leaves: list[Any], choices: list[bool], spec: pytree.PyTreeSpec) -> Any:
    """The tree with ``None`` for the leaves that are not chosen."""
    return pytree.unflatten(
        spec, [leaf if choice else None for leaf, choice in zip(leaves, choices, strict=True)]
    )


def choices_of(spec: pytree.PyTreeSpec, mask: Mask, params: Params | None) -> list[bool]:
    """The values of a mask, one for each leaf.

    Args:
        spec: the structure of the parameters.
        mask: a tree of bools, a function from the parameters to one, or patterns of names.
        params: the parameters, if they are known.

    Raises:
        TypeError: the mask has other leaves than bools.
        ValueError: it has another structure, or is a function and ``params`` are missing; a pattern matches no name.
    """
    if (patterns := _patterns_of(mask)) is not None:
        names = [".".join(map(str, path)) for path in spec.paths()]
        if all(name.isdecimal() for name in names):
            raise ValueError(
                "`mask` must be a tree of bools or a function for a list of parameters, which has no names, got "
                f"{mask!r}"
            )
        check_patterns("mask", patterns, names)
        return [first_match(name, patterns) is not None for name in names]
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


def _patterns_of(mask: Mask) -> list[str] | None:
    """The patterns of names, if the mask is one or a list of them."""
    if isinstance(mask, str):
        return [mask]
    if isinstance(mask, (list, tuple)) and mask and all(isinstance(each, str) for each in mask):
        return list(mask)
    return None
