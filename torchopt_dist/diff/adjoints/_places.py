"""A loop → which leaves of its state may have a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import has_derivative, leaf_like
from torchopt_dist.diff.adjoints._declared import leaves_at
from torchopt_dist.diff.adjoints._loop import Carry, Evaluation, Loop

__all__ = ["of_frozen_parameters", "state_places"]


def state_places(loop: Loop) -> list[int]:
    """Which leaves of the optimizer's state may have a gradient: those that depend on gradients or have a history.

    What a step does may depend on the state's values, as with :func:`~torchopt_dist.transform.multi_steps`, so that one
    step does not show them all: those that it leaves alone are taken to be among them, but for those of frozen
    parameters.
    """
    leaves, spec = pytree.flatten(loop.first.state)
    places = {n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad}
    params = leaves_at(loop.first.params, loop.model.moved_places)
    grads: list[OptionalTensor] = [None] * len(params)
    for place in loop.model.moved_places:
        grads[place] = torch.zeros_like(params[place], requires_grad=True)
    found = Evaluation(params[0], None, grads, [])
    while True:
        state = pytree.unflatten(spec, [leaf_like(x) if n in places else x for n, x in enumerate(leaves)])
        after = pytree.flatten(loop.moved(Carry(params, state, []), found, record=True).state)[0]
        reached = {n for n, leaf in enumerate(after) if isinstance(leaf, Tensor) and leaf.requires_grad}
        if reached <= places:
            break
        places |= reached
    pairs = enumerate(zip(leaves, after, strict=True))
    alone = {n for n, (old, new) in pairs if has_derivative(old) and _is_same_memory(old, new)}
    return sorted(places | (alone - (loop.constant_state if loop.samples else of_frozen_parameters(loop))))


def of_frozen_parameters(loop: Loop) -> frozenset[int]:
    """Places of the leaves of the state that belong to parameters without a gradient.

    These are the leaves that ``init`` leaves out where such a parameter is ``None``, as with
    :func:`~torchopt_dist.transform.masked`. An ``init`` that does not take ``None`` does not tell, so none is known.
    """
    moved = set(loop.model.moved_places)
    if len(moved) == len(loop.first.params):
        return frozenset()
    # Of one element each, whose state takes no memory.
    without = [
        torch.zeros((1,) * leaf.ndim, dtype=leaf.dtype, device=leaf.device) if place in moved else None
        for place, leaf in enumerate(loop.first.params)
    ]
    try:
        others = pytree.flatten(loop.optimizer.init(loop.model.tree(without)))[0]
    except Exception:  # of an initializer of the caller's
        return frozenset()
    leaves = pytree.flatten(loop.first.state)[0]
    if len(others) != len(leaves):
        return frozenset()
    return frozenset(n for n, other in enumerate(others) if other is None and isinstance(leaves[n], Tensor))


def _is_same_memory(old: Tensor, new: Any) -> bool:
    """Whether they have the same numbers, since one is the other, perhaps by way of a ``vmap``."""
    same_shape = isinstance(new, Tensor) and new.shape == old.shape
    return new is old or (same_shape and new.data_ptr() == old.data_ptr() and new.stride() == old.stride())
