"""The gradient of a loss with its graph → products with its derivatives, by reverse over reverse mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist._random_turns import Turn
from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import pulled_back
from torchopt_dist.diff.adjoints._declared import leaves_at
from torchopt_dist.diff.adjoints._loop import Carry, Loop
from torchopt_dist.transform._recorded_gradients import recorded_gradients

__all__ = ["Graph", "graph_of"]


class Graph(NamedTuple):
    """The gradient of a loss, with its graph."""

    inputs: list[Tensor]
    """What it is with respect to, one a moved parameter."""
    loss: Tensor
    grads: Sequence[OptionalTensor]

    def products(
        self, along: Sequence[OptionalTensor], loss_bar: OptionalTensor, declared: Sequence[Tensor]
    ) -> tuple[list[OptionalTensor], list[OptionalTensor]]:
        """The gradients of ``sum(along * grads) + loss_bar * loss``: of the inputs, and of what is declared.

        Args:
            along: one an input.
            loss_bar: 0-d.
            declared: what else there is to be a gradient for.
        """
        found = pulled_back([*self.grads, self.loss], [*along, loss_bar], [*self.inputs, *declared])
        return found[: len(self.inputs)], found[len(self.inputs) :]


def graph_of(loop: Loop, carry: Carry, number: int) -> Graph:
    """Evaluate the loss of a step, and its gradient with a graph."""
    places = loop.model.moved_places
    params = leaves_at(carry.params, places)
    inputs = [params[place] for place in places]
    tied = [params[place] for place in loop.model.first_places]
    with torch.enable_grad(), Turn(exclusive=True):
        loss, _aux, _buffers = loop.evaluate(tied, carry.buffers, number)
        loss = loss.reshape(loop.samples)
        grads: Sequence[OptionalTensor] = [None] * len(inputs)
        if loss.requires_grad:
            grads = recorded_gradients(loss.sum(), inputs)
        return Graph(inputs, loss, grads)
