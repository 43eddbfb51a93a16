"""Gradients, parameters → the gradients plus a part of the parameters: weight decay."""

from __future__ import annotations

from functools import partial

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, PerLeaf, Updates
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._elementwise import check_dense
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_per_leaf,
    is_per_leaf,
    is_zero,
    plain_rates,
    times_per_leaf,
)
from torchopt_dist.transform.base import EmptyState, GradientTransformation, identity, of_elements, stateless
from torchopt_dist.transform.masked import Mask, choices_of
from torchopt_dist.transform.scale import scale

__all__ = ["add_decayed_weights", "penalized"]


def add_decayed_weights(
    weight_decay: HyperParameter | PerLeaf = 0.0, mask: Mask = None
) -> GradientTransformation:
    """Add ``weight_decay`` times the parameter to each gradient.

    Before the rest of a chain this is L2 regularization (``torch.optim.SGD``), after it decoupled weight
    decay [Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization].

    Args:
        weight_decay: a number that is at least 0 (0: the identity), a tensor of one element, which may require grad,
            or a tree of numbers and tensors, one for each parameter: of one element, or of a shape that broadcasts to
            the parameter's.
        mask: which parameters decay: a pattern of their names, such as ``"*.weight"``, or a list of patterns; a tree of
            bools of the parameters' structure, or a function from the parameters to such a tree (defined at module
            level, if the transformation is to be pickled). All, if not given.

    Raises:
        TypeError: ``weight_decay`` has the wrong type; from ``update``, the mask has other leaves than bools.
        ValueError: it is negative; from ``update``, ``params`` are missing, or a structure differs.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = add_decayed_weights(0.5)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 2.5000, -5.0000])
    """
    check_per_leaf("weight_decay", weight_decay)
    if is_zero(weight_decay):
        return identity()
    return GradientTransformation(stateless, partial(_update, plain_rates(weight_decay), mask))


def penalized(weight_decay: HyperParameter, maximize: bool) -> list[GradientTransformation]:
    """The links that turn a gradient into the one to descend along: negated to maximize, plus an L2 penalty."""
    return [*([scale(-1.0)] if maximize else []), add_decayed_weights(weight_decay)]


@of_elements(masks=True)
def _update(
    weight_decay: HyperParameter | PerLeaf,
    mask: Mask,
    updates: Updates,
    state: EmptyState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if params is None:
        raise ValueError("`params` must be given to `update`: weight decay needs the parameters, got None")
    leaves, spec = pytree.flatten(updates)
    weights = pytree.flatten_like(spec, params, "params", "updates")
    places = present(leaves)
    if mask is not None:
        chosen = choices_of(spec, mask, params)
        places = [place for place in places if chosen[place]]
    grads = pick(leaves, places)
    check_dense(grads)
    if is_per_leaf(weight_decay):
        chosen_weights = put([None] * len(leaves), places, pick(weights, places))
        penalties = times_per_leaf(chosen_weights, weight_decay, spec, "weight_decay")
        decayed = foreach.add(grads, pick(penalties, places))
    else:
        decayed = foreach.add(grads, pick(weights, places), weight_decay)
    return pytree.unflatten(spec, put(leaves, places, decayed)), state
