"""An optimizer → the same, whose parameters every few steps go back to slow ones, a part of the way."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, TensorTree, Updates
from torchopt_dist.ops._columns import present
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero
from torchopt_dist.transform.base import GradientTransformation, no_transformation, of_elements

__all__ = ["LookaheadState", "lookahead"]


class LookaheadState(NamedTuple):
    """The state of :func:`lookahead`."""

    step: Tensor
    """How many updates there have been: 0-d, int64, on the CPU."""
    slow: TensorTree
    """The slow parameters: a tensor for each parameter, of its shape and dtype."""
    inner_state: OptState
    """The state of the inner transformation."""


def lookahead(
    inner: GradientTransformation, sync_period: int = 6, slow_step_size: HyperParameter = 0.5
) -> GradientTransformation:
    """Let ``inner`` make ``sync_period`` steps, then move the slow parameters a part of the way, and go on from there.

    After every ``sync_period`` updates, with ``s`` the slow parameters and ``p`` those that ``inner`` has led to, both
    become ``s + slow_step_size * (p - s)``. The slow parameters start as the first ones. [Zhang et al. 2019, Lookahead
    Optimizer: k steps forward, 1 step back, algorithm 1.] A parameter without a gradient in such a step stays, and so
    does its slow one. It reads the count, so it does not work under ``torch.compile(fullgraph=True)``.

    Args:
        inner: a whole optimizer, such as ``todist.adam(lr=0.1)``.
        sync_period: how many steps there are from one such move to the next, at least 1.
        slow_step_size: a number that is at least 0, or a tensor of one element, which may require grad.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range; from ``update``: ``params`` are missing.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> w = torch.tensor([1.0])
        >>> init, update = lookahead(todist.sgd(lr=0.5), sync_period=1)
        >>> update(torch.tensor([1.0]), init(w), params=w)[0]
        tensor([-0.2500])
    """
    if not isinstance(inner, GradientTransformation):
        raise no_transformation("inner", inner)
    if not isinstance(sync_period, int) or isinstance(sync_period, bool):
        raise TypeError(f"`sync_period` must be an int, got {type(sync_period).__name__}")
    if sync_period < 1:
        raise ValueError(f"`sync_period` must be at least 1, got {sync_period}")
    check_at_least_zero("slow_step_size", slow_step_size)
    return GradientTransformation(partial(_init, inner), partial(_update, inner, sync_period, slow_step_size))


def _init(inner: GradientTransformation, params: Params, /) -> LookaheadState:
    step = torch.zeros((), dtype=torch.int64, device="cpu")
    return LookaheadState(step, pytree.map_tensors(torch.clone, params), inner.init(params))


@of_elements()
def _update(
    inner: GradientTransformation,
    sync_period: int,
    slow_step_size: HyperParameter,
    updates: Updates,
    state: LookaheadState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, LookaheadState):
        raise TypeError(f"`state` must be a LookaheadState, got {type(state).__name__}")
    if params is None:
        raise ValueError("`params` must be given to `update`: slow parameters follow them, got None")
    moved, inner_state = inner.update(updates, state.inner_state, params=params, inplace=inplace)
    step = state.step + 1
    if int(step) % sync_period:
        return moved, LookaheadState(step, state.slow, inner_state)
    leaves, spec = pytree.flatten(moved)
    weights = pytree.flatten_like(spec, params, "params", "updates")
    slow = list(pytree.flatten_like(spec, state.slow, "state.slow", "updates"))
    for place in present(leaves):
        fast = weights[place] + leaves[place]
        part = slow_step_size
        if isinstance(part, Tensor):
            part = part.reshape(()).to(fast.device)
        slow[place] = (slow[place] + part * (fast - slow[place])).to(fast.dtype)
        leaves[place] = slow[place] - weights[place]
    return pytree.unflatten(spec, leaves), LookaheadState(step, pytree.unflatten(spec, slow), inner_state)
