"""What goes into a step of an inner loop → what comes out of it: the types of both, and a carry that is moved in place.

A :class:`Carry` goes from step to step, an :class:`Evaluation` from the loss to the optimizer, an :class:`Outcome` to
the caller.

A step in place is as fast as in training. If the loss has kept something of a parameter (a view, an entry of a log, a
graph), that stays as it was: the step leaves the parameter's memory alone, and continues in a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.diff.adjoints._model import Model
from torchopt_dist.torch_private import memory_is_shared
from torchopt_dist.transform.apply_updates import training_step
from torchopt_dist.transform.base import GradientTransformation

__all__ = [
    "Accumulation",
    "Batches",
    "Carry",
    "Evaluation",
    "Outcome",
    "Seen",
    "StepFn",
    "StopFn",
    "UpdateLookFn",
    "WatchFn",
    "moved_in_place",
    "overwritable",
    "owned",
]


Batches = Sequence[Any] | Callable[[int], Any] | None
"""By number of the step; ``None`` where the loss takes no batch."""
UpdateLookFn = Callable[[Sequence[Tensor], Sequence[Tensor], Callable[[], Sequence[Tensor]]], None]
"""Is shown the ends of the graph of an update, what it may begin with, and what makes it once more."""
StopFn = Callable[[int, Tensor], Any]
"""The number of a step, its loss → whether it was the last."""


class Carry(NamedTuple):
    """The values that one step passes to the next."""

    params: list[Tensor]
    """The leaves of the parameters, a tied one at each of its places."""
    state: OptState
    """The optimizer's state."""
    buffers: list[Tensor]
    """The module's buffers."""


class Evaluation(NamedTuple):
    """A loss and its gradient."""

    loss: Tensor
    """0-d."""
    aux: Any
    """What else the loss returned."""
    grads: list[OptionalTensor]
    """A gradient a leaf of the parameters; ``None`` at frozen ones, and at all but the first place of a tied one."""
    buffers: list[Tensor]
    """The buffers after the call."""


class Outcome(NamedTuple):
    """The result of a run of steps."""

    carry: Carry
    """After the last step."""
    losses: list[Tensor]
    """One a step, 0-d, before the step's update."""
    aux: list[Any]
    """One a step."""

    def with_moved(self, model: Model, leaves: Sequence[Tensor]) -> Outcome:
        """The same with other tensors in the places of the parameters that the loop moves, a tied one at each."""
        params = list(self.carry.params)
        for place, leaf in zip(model.moved_places, leaves, strict=True):
            params[place] = leaf
        tied = [params[place] for place in model.first_places]
        return self._replace(carry=self.carry._replace(params=tied))


class StepFn(Protocol):
    """A step in one of its forms."""

    def __call__(self, carry: Carry, number: int, /) -> tuple[Carry, Tensor, Any]:
        """Return the next carry, the loss, and the other values that the loss returned."""


class Seen(NamedTuple):
    """What a plain step is made of, before its backward pass."""

    carry: Carry
    """What it starts from."""
    number: int
    """Of the step."""
    loss: Tensor
    """With its graph."""
    leaves: list[Tensor]
    """Those of the parameters that it is differentiated with respect to."""
    buffers: list[Tensor]
    """After the step."""
    aux: Any = None
    """What else the loss returned."""


WatchFn = Callable[[Seen], None]
"""Is shown each plain step."""


class Accumulation(Protocol):
    """Takes the steps of a loop in parts of their batches."""

    def gradient(
        self, loop: Any, carry: Carry, number: int, *, record: bool, watch: WatchFn | None
    ) -> Evaluation:
        """The loss of a step and its gradient, as ``Loop.gradient``."""

    def evaluate(
        self, loop: Any, leaves: Sequence[Tensor], buffers: Sequence[Tensor], number: int
    ) -> tuple[Tensor, Any, list[Tensor]]:
        """The loss of a step, as ``Loop.evaluate``."""


def owned(leaves: Sequence[Tensor], state: OptState, places: Sequence[int]) -> tuple[list[Tensor], OptState]:
    """Copies, without history, of the leaves at ``places`` and of a state; other leaves stay the same tensors."""
    copies = list(leaves)
    for place in places:
        copies[place] = _copied(copies[place])
    return copies, pytree.map_tensors(_copied, state)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def overwritable(tensor: Tensor) -> Tensor:
    """The same values, which may be overwritten: in the same memory, if nothing else holds it."""
    return tensor.detach().clone() if memory_is_shared(tensor) else tensor.detach()


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
