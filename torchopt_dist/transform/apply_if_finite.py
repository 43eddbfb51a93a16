"""Gradients → the inner transformation's updates if all gradients are finite, else none, and how often that was."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.ops._columns import pick, present
from torchopt_dist.transform._elementwise import check_dense
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["ApplyIfFiniteState", "apply_if_finite"]


class ApplyIfFiniteState(NamedTuple):
    """The state of :func:`apply_if_finite`."""

    consecutive: Tensor
    """Updates left out since the last one that was made: 0-d, int64, on the CPU."""
    total: Tensor
    """Updates whose gradients were not finite, so far."""
    inner_state: OptState
    """The state of the inner transformation."""


def apply_if_finite(inner: GradientTransformation, max_consecutive: int) -> GradientTransformation:
    """Leave out an update where a gradient has an entry that is infinite or not a number.

    All updates are then ``None``, which leaves parameters where they are, and the inner state stays as it is. After
    ``max_consecutive`` such updates in a row the next one is made all the same, so that divergence does not go
    unnoticed.

    It reads the values, so it synchronizes with a GPU, and works neither in ``vmap`` nor under
    ``torch.compile(fullgraph=True)``.

    Args:
        inner: the transformation, usually a whole optimizer.
        max_consecutive: how many updates in a row may be left out, at least 0.

    Raises:
        TypeError: ``inner`` is not a gradient transformation, ``max_consecutive`` is not an int; from ``update``: a
            gradient is sparse.
        ValueError: ``max_consecutive`` is negative.

    Example:
        >>> import torch
        >>> from torchopt_dist.transform.scale import scale
        >>> init, update = apply_if_finite(scale(-1.0), 5)
        >>> updates, state = update([torch.tensor([1.0, torch.inf])], init([torch.zeros(2)]))
        >>> updates, int(state.total)
        ([None], 1)
    """
    if not isinstance(inner, GradientTransformation):
        raise TypeError(f"`inner` must be a GradientTransformation, got {type(inner).__name__}")
    if not isinstance(max_consecutive, int) or isinstance(max_consecutive, bool):
        raise TypeError(f"`max_consecutive` must be an int, got {type(max_consecutive).__name__}")
    if max_consecutive < 0:
        raise ValueError(f"`max_consecutive` must be at least 0, got {max_consecutive}")
    return GradientTransformation(partial(_init, inner), partial(_update, inner, max_consecutive))


def _init(inner: GradientTransformation, params: Params, /) -> ApplyIfFiniteState:
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    return ApplyIfFiniteState(zero, zero.clone(), inner.init(params))


def _update(
    inner: GradientTransformation,
    max_consecutive: int,
    updates: Updates,
    state: ApplyIfFiniteState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, ApplyIfFiniteState):
        raise TypeError(f"`state` must be an ApplyIfFiniteState, got {type(state).__name__}")
    leaves, spec = pytree.flatten(updates)
    grads = pick(leaves, present(leaves))
    check_dense(grads)
    if _are_finite(grads):
        moved, inner_state = inner.update(updates, state.inner_state, params=params, inplace=inplace)
        return moved, ApplyIfFiniteState(torch.zeros_like(state.consecutive), state.total, inner_state)
    consecutive, total = state.consecutive + 1, state.total + 1
    if int(consecutive) <= max_consecutive:
        left_out = pytree.unflatten(spec, [None] * len(leaves))
        return left_out, ApplyIfFiniteState(consecutive, total, state.inner_state)
    moved, inner_state = inner.update(updates, state.inner_state, params=params, inplace=inplace)
    return moved, ApplyIfFiniteState(torch.zeros_like(consecutive), total, inner_state)


def _are_finite(grads: list[Tensor]) -> bool:
    """Read the values once for each device, not once for each tensor."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad.detach().isfinite().all())
    return all(bool(torch.stack(flags).all()) for flags in by_device.values())
