"""A carry of the loop's own, gradients → the next carry, in the same memory wherever only the carry holds it.

A step in place is as fast as in training. If the loss has kept something of a parameter (a view, an entry of a log, a
graph), that stays as it was: the step leaves the parameter's memory alone, and continues in a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.diff.adjoints._model import Model
from torchopt_dist.torch_private import memory_is_shared
from torchopt_dist.transform.apply_updates import training_step
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["moved_in_place", "owned"]


def owned(leaves: Sequence[Tensor], state: OptState, places: Sequence[int]) -> tuple[list[Tensor], OptState]:
    """Copies, without history, of the leaves at ``places`` and of a state; other leaves stay the same tensors."""
    copies = list(leaves)
    for place in places:
        copies[place] = _copied(copies[place])
    return copies, pytree.map_tensors(_copied, state)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def moved_in_place(
    optimizer: GradientTransformation,
    model: Model,
    leaves: list[Tensor],
    grads: list[OptionalTensor],
    state: OptState,
) -> tuple[list[Tensor], OptState]:
    """Make one step on what :func:`owned` or an earlier step has returned.

    Args:
        optimizer: the gradient transformation that makes the step.
        model: the model of the leaves; it drops the leaves with which it was filled.
        leaves: the parameters, a tied one at each of its places.
        grads: a gradient for each leaf; they stay as they are.
        state: the optimizer's state.

    Returns:
        The moved leaves and the next state; the given ones must not be used any more.
    """
    model.let_go()
    moved = list(leaves)
    for place in model.moved_places:
        if memory_is_shared(moved[place]):
            moved[place] = _copied(moved[place])
    tied = [moved[place] for place in model.first_places]
    return tied, training_step(optimizer, tied, grads, state, model.tree)
