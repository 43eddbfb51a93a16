"""Updates, parameters → the updates as they are; the state has the average of the parameters over the steps."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, TensorTree, Updates
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._elementwise import check_dense, counts
from torchopt_dist.transform._hyperparameters import HyperParameter, check_decay
from torchopt_dist.transform.base import GradientTransformation, of_elements

__all__ = ["AverageParamsState", "average_params"]


class AverageParamsState(NamedTuple):
    """The state of :func:`average_params`."""

    average: TensorTree
    """The averages: a tensor for each parameter, of its shape and dtype; before the first step the first parameters."""
    step: TensorTree
    """How many updates each parameter has had: a 0-d float32 tensor each, on the CPU."""


def average_params(decay: HyperParameter | None = None) -> GradientTransformation:
    """Keep the average of the parameters; to be the last link of a chain, after the learning rate.

    The parameters move as without it. The average after the first step is the parameters then; after that it is ``decay
    * average + (1 - decay) * p``, or, without a decay, the mean over all steps (Polyak and Juditsky 1992). Both are
    those of ``torch.optim.swa_utils.AveragedModel``. A parameter without a gradient keeps its average.

    The averages are in the state: ``optimizer.state[p]["average"]`` of a :class:`~torchopt_dist.Optimizer`,
    ``result.state[-1].average`` of an inner loop.

    Args:
        decay: a number that is at least 0 and below 1, or a tensor of one element, which may require grad; ``None``
            means the mean over all steps.

    Raises:
        TypeError: ``decay`` has the wrong type.
        ValueError: it is out of its range; from ``update``: ``params`` are missing.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> w = torch.tensor([1.0])
        >>> impl = todist.chain(todist.sgd(lr=0.5), average_params())
        >>> _, state = impl.update(torch.tensor([1.0]), impl.init(w), params=w)
        >>> state[-1].average
        tensor([0.5000])
    """
    if decay is not None:
        check_decay("decay", decay)
    return GradientTransformation(_init, partial(_update, decay))


def _init(params: Params, /) -> AverageParamsState:
    return AverageParamsState(pytree.map_tensors(torch.clone, params), counts(params))


@of_elements()
def _update(
    decay: HyperParameter | None,
    updates: Updates,
    state: AverageParamsState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, AverageParamsState):
        raise TypeError(f"`state` must be an AverageParamsState, got {type(state).__name__}")
    if params is None:
        raise ValueError("`params` must be given to `update`: their average needs them, got None")
    leaves, spec = pytree.flatten(updates)
    weights = pytree.flatten_like(spec, params, "params", "updates")
    averages = list(pytree.flatten_like(spec, state.average, "state.average", "updates"))
    steps = pytree.flatten_like(spec, state.step, "state.step", "updates")
    places = present(leaves)
    check_dense(pick(leaves, places))
    for place in places:
        new = weights[place] + leaves[place]
        share = share_of_newest(steps[place], new, decay)
        averages[place] = (averages[place] + share * (new - averages[place])).to(new.dtype)
    steps = put(steps, places, foreach.add_number(pick(steps, places), 1))
    return updates, AverageParamsState(pytree.unflatten(spec, averages), pytree.unflatten(spec, steps))


def share_of_newest(step: Tensor, like: Tensor, decay: HyperParameter | None = None) -> Tensor:
    """The weight of a new value in an average of so many: 1 for the first, then ``1 - decay`` or one over the number.

    Args:
        step: how many values the average is of.
        like: a tensor of the dtype and the device to compute with.
        decay: as that of :func:`average_params`.
    """
    dtype = torch.promote_types(like.real.dtype if like.is_complex() else like.dtype, torch.float32)
    count = step.to(like.device, dtype)
    if decay is None:
        return 1 / (count + 1)
    if isinstance(decay, Tensor):
        decay = decay.reshape(()).to(like.device)
    return torch.where(count == 0, torch.ones_like(count), 1 - decay)
