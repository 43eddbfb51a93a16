"""An optimizer → the same on averaged parameters, for training that needs no schedule and has no end fixed before."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, TensorTree, Updates
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._elementwise import counts
from torchopt_dist.transform._hyperparameters import HyperParameter, check_decay
from torchopt_dist.transform.average_params import share_of_newest
from torchopt_dist.transform.base import GradientTransformation, no_transformation, of_elements

__all__ = ["ScheduleFreeState", "schedule_free"]


class ScheduleFreeState(NamedTuple):
    """The state of :func:`schedule_free`."""

    z: TensorTree
    """The parameters that the inner optimizer moves: a tensor for each parameter, of its shape and dtype."""
    average: TensorTree
    """Their mean over all steps, the parameters to evaluate with; before the first step the first parameters."""
    step: TensorTree
    """How many updates each parameter has had: a 0-d float32 tensor each, on the CPU."""
    inner_state: OptState
    """The state of the inner transformation."""


def schedule_free(inner: GradientTransformation, b1: HyperParameter = 0.9) -> GradientTransformation:
    """Take gradients between the parameters that ``inner`` moves and their mean; that mean is the result.

    With ``u`` the inner update of the gradient at the parameters ``y``, step ``t`` makes ``z = z + u``, then ``x = x +
    (z - x) / t``, and ``y = (1 - b1) z + b1 x``. [Defazio et al. 2024, The Road Less Scheduled, equations 3 to 5; all
    steps count the same.] Give ``inner`` no momentum, since ``b1`` is in its place: ``todist.sgd(lr)``,
    ``todist.rmsprop(lr)`` or ``todist.adamw(lr, betas=(0.0, 0.999))``.

    The parameters are ``y``. To evaluate, use ``x``, which is in the state: ``optimizer.state[p]["average"]`` of a
    :class:`~torchopt_dist.Optimizer`, ``result.state.average`` of an inner loop.

    Args:
        inner: a whole optimizer.
        b1: a number that is at least 0 and below 1, or a tensor of one element, which may require grad.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``b1`` is out of its range; from ``update``: ``params`` are missing.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> w = torch.tensor([1.0])
        >>> impl = schedule_free(todist.sgd(lr=0.5))
        >>> updates, state = impl.update(torch.tensor([1.0]), impl.init(w), params=w)
        >>> updates, state.average
        (tensor([-0.5000]), tensor([0.5000]))
    """
    if not isinstance(inner, GradientTransformation):
        raise no_transformation("inner", inner)
    check_decay("b1", b1)
    return GradientTransformation(partial(_init, inner), partial(_update, inner, b1))


def _init(inner: GradientTransformation, params: Params, /) -> ScheduleFreeState:
    z, average = (pytree.map_tensors(torch.clone, params) for _ in range(2))
    return ScheduleFreeState(z, average, counts(params), inner.init(params))


@of_elements()
def _update(
    inner: GradientTransformation,
    b1: HyperParameter,
    updates: Updates,
    state: ScheduleFreeState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, ScheduleFreeState):
        raise TypeError(f"`state` must be a ScheduleFreeState, got {type(state).__name__}")
    if params is None:
        raise ValueError("`params` must be given to `update`: their average needs them, got None")
    moved, inner_state = inner.update(updates, state.inner_state, params=params, inplace=inplace)
    leaves, spec = pytree.flatten(moved)
    weights = pytree.flatten_like(spec, params, "params", "updates")
    z, x, steps = (
        list(pytree.flatten_like(spec, tree, f"state.{name}", "updates"))
        for name, tree in (("z", state.z), ("average", state.average), ("step", state.step))
    )
    places = present(leaves)
    for place in places:
        new = z[place] + leaves[place]
        share = share_of_newest(steps[place], new)
        b = b1.reshape(()).to(new.device) if isinstance(b1, Tensor) else b1
        z[place] = new.to(weights[place].dtype)
        x[place] = (x[place] + share * (new - x[place])).to(new.dtype)
        leaves[place] = ((1 - b) * z[place] + b * x[place] - weights[place]).to(new.dtype)
    steps = put(steps, places, foreach.add_number(pick(steps, places), 1))
    moving, average, step = (pytree.unflatten(spec, each) for each in (z, x, steps))
    return pytree.unflatten(spec, leaves), ScheduleFreeState(moving, average, step, inner_state)
