"""A loop → its outcome with the graph of its updates, in which the inner gradients are constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.diff.adjoints._checks import run_aloud
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints.adjoint import Adjoint
from torchopt_dist.transform.base import ChainedGradientTransformation

__all__ = ["FirstOrder"]


@dataclass(frozen=True)
class FirstOrder(Adjoint):
    """The inner gradients are taken as constants: first-order MAML (Finn et al., 2017), ANIL with masked parameters.

    There is no second-order graph. The initial parameters, the initial state and hyper-parameters get the gradient of
    the optimizer's updates with the inner gradients held constant; what the inner loss uses gets none. So a backward
    pass raises a ``ValueError`` for what ``meta`` lists, and only the inner loss uses. If hyper-parameters are numbers,
    there is no weight decay, and the initial state has no history, nothing is kept beside plain training. Losses are
    not connected.
    """

    runs_again: ClassVar[bool] = False

    @property
    def batches_again(self) -> int:
        """Each batch is read once."""
        return 0

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        return run_aloud("FirstOrder", self._run, loop)

    def _run(self, loop: Loop) -> Outcome:
        if not _only_adds(loop):
            return loop.run(loop.first_order_step, loop.first)
        outcome = loop.run(loop.training_step, loop.own(loop.first))
        places = loop.model.moved_places
        first = [loop.first.params[place] for place in places]
        if loop.is_substituted:
            first = [leaf.view_as(leaf) for leaf in first]
        params = list(outcome.carry.params)
        connected = _Moved.apply([params[place] for place in places], *first)
        for place, leaf in zip(places, connected, strict=True):
            params[place] = leaf
        tied = [params[place] for place in loop.model.first_places]
        return outcome._replace(carry=outcome.carry._replace(params=tied))


def _only_adds(loop: Loop) -> bool:
    """Whether the steps, with gradients as constants, only add constants to the initial parameters."""
    optimizer = loop.optimizer
    if not loop.trains_in_place or not isinstance(optimizer, ChainedGradientTransformation):
        return False
    step = optimizer.fused_step
    state = pytree.flatten(loop.first.state)[0]
    return (
        step.of_gradients_alone
        and step.first_link == 0
        and not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in state)
    )


class _Moved(torch.autograd.Function):
    """Initial parameters → these plus constants."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, moved: list[Tensor], *first: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(moved)

    @staticmethod
    def backward(ctx: Any, *grads: OptionalTensor) -> tuple[OptionalTensor, ...]:
        return None, *grads
