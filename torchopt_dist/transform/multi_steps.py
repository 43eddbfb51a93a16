"""Gradients of several batches → once for all of them, the inner transformation's update of their mean."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, TensorTree, Updates
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._elementwise import check_dense, counts, filled
from torchopt_dist.transform.base import GradientTransformation, of_elements

__all__ = ["MultiStepsState", "multi_steps"]


class MultiStepsState(NamedTuple):
    """The state of :func:`multi_steps`."""

    mini_step: Tensor
    """Gradients gathered since the inner transformation's last update: 0-d, int64, on the CPU."""
    summed: TensorTree
    """Their sums: a tensor for each parameter, of its shape and dtype."""
    step: TensorTree
    """How many gradients each parameter has had since then: a 0-d float32 tensor each, on the CPU."""
    inner_state: OptState
    """The state of the inner transformation."""


def multi_steps(inner: GradientTransformation, every: int) -> GradientTransformation:
    """Accumulate the gradients of ``every`` updates, and give ``inner`` their mean: a batch ``every`` times as large.

    In between, all updates are ``None``, which leaves parameters where they are. A parameter without a gradient in one
    of them counts as having the gradient 0 there; a parameter without a gradient in all of them stays as it is, and so
    does its state.

    Args:
        inner: the transformation, usually a whole optimizer.
        every: how many updates to accumulate, at least 1.

    Raises:
        TypeError: ``inner`` is not a gradient transformation, ``every`` is not an int; from ``update``: a gradient is
            sparse.
        ValueError: ``every`` is less than 1.

    Example:
        >>> import torch
        >>> from torchopt_dist.transform.scale import scale
        >>> init, update = multi_steps(scale(-1.0), 2)
        >>> first, state = update([torch.tensor([1.0])], init([torch.zeros(1)]))
        >>> second, state = update([torch.tensor([3.0])], state)
        >>> first, second
        ([None], [tensor([-2.])])
    """
    if not isinstance(inner, GradientTransformation):
        raise TypeError(f"`inner` must be a GradientTransformation, got {type(inner).__name__}")
    if not isinstance(every, int) or isinstance(every, bool):
        raise TypeError(f"`every` must be an int, got {type(every).__name__}")
    if every < 1:
        raise ValueError(f"`every` must be at least 1, got {every}")
    return GradientTransformation(partial(_init, inner), partial(_update, inner, every))


def _init(inner: GradientTransformation, params: Params, /) -> MultiStepsState:
    begun = torch.zeros((), dtype=torch.int64, device="cpu")
    return MultiStepsState(begun, _zeros(params), counts(params), inner.init(params))


def _zeros(params: Params) -> TensorTree:
    return filled(params)


@of_elements()
def _update(
    inner: GradientTransformation,
    every: int,
    updates: Updates,
    state: MultiStepsState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, MultiStepsState):
        raise TypeError(f"`state` must be a MultiStepsState, got {type(state).__name__}")
    leaves, spec = pytree.flatten(updates)
    sums = pytree.flatten_like(spec, state.summed, "state.summed", "updates")
    had = pytree.flatten_like(spec, state.step, "state.step", "updates")
    places = present(leaves)
    check_dense(pick(leaves, places))
    sums = put(sums, places, foreach.add(pick(sums, places), pick(leaves, places)))
    had = put(had, places, foreach.add_number(pick(had, places), 1))
    gathered = int(state.mini_step) + 1
    if gathered < every:
        waiting = MultiStepsState(
            state.mini_step + 1, pytree.unflatten(spec, sums), pytree.unflatten(spec, had), state.inner_state
        )
        return pytree.unflatten(spec, [None] * len(leaves)), waiting
    there = [place for place, count in enumerate(had) if count is not None and int(count) > 0]
    means = foreach.multiply(pick(sums, there), 1 / every)
    given = pytree.unflatten(spec, put([None] * len(leaves), there, means))
    moved, inner_state = inner.update(given, state.inner_state, params=params, inplace=inplace)
    begun = MultiStepsState(
        torch.zeros_like(state.mini_step),
        _zeros(pytree.unflatten(spec, sums)),
        counts(pytree.unflatten(spec, had)),
        inner_state,
    )
    return moved, begun
