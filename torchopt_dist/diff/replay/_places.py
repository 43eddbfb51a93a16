"""A loop → which leaves of its state may have a gradient, and its parameters in portions."""

from __future__ import annotations

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.diff.adjoints._loop import Carry, Evaluation, Loop
from torchopt_dist.diff.replay._reverse_mode import leaf_like, leaves_at
from torchopt_dist.typing import OptionalTensor

__all__ = ["portions", "state_places"]


def state_places(loop: Loop) -> list[int]:
    """Which leaves of the optimizer's state may have a gradient: those that depend on gradients or have a history."""
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
            return sorted(places)
        places |= reached


def portions(loop: Loop, count: int) -> list[frozenset[int]]:
    """The places of the parameters in at most ``count`` portions of about the same size."""
    sizes = {place: loop.first.params[place].numel() for place in loop.model.moved_places}
    made: dict[int, set[int]] = {}
    before = 0
    for place, size in sizes.items():
        made.setdefault(before * count // max(1, sum(sizes.values())), set()).add(place)
        before += size
    return list(map(frozenset, made.values()))
