"""The start of a step, a direction → products with the second derivatives of its loss; a way to them a class.

By forward over reverse mode no graph of a graph is made [Kemaev et al. 2025, MixFlow-MG, arXiv 2505.00793]. Where the
loss's intermediate results are small compared with the parameters, the graph of a graph is small, too: then the
products are the gradient of ``sum(along * gradient)``, by reverse over reverse mode, since duals need twice as many
passes over tensors of the parameters' size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist._formulas import ForwardModeFormulas
from torchopt_dist._formulas.normalization_nodes import mend
from torchopt_dist._random_turns import Turn
from torchopt_dist._torch_private import bytes_of_results
from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import pulled_back
from torchopt_dist.diff.adjoints._declared import leaves_at, nodes_between
from torchopt_dist.diff.adjoints._loop import Carry, Loop
from torchopt_dist.diff.replay._blocks import Tangents, sweep
from torchopt_dist.diff.replay._blockwise import BlockwiseLoop
from torchopt_dist.diff.replay._duals import NoForwardModeError, loses_tangents
from torchopt_dist.diff.replay._reverse_mode import Graph, graph_of
from torchopt_dist.diff.replay._snapshots import bytes_of
from torchopt_dist.errors import CollectiveError
from torchopt_dist.ops._columns import put

__all__ = ["ByRecording", "Direction", "Sweep", "SweepMode", "small_graph", "sweeps_for"]

SweepMode = Literal["forward", "reverse"]
"""Of the derivative of an inner gradient: forward over reverse, or reverse over reverse."""
SMALL = 1 << 24
"""Bytes of a graph that are not worth the time of forward mode."""

Products = tuple[list[OptionalTensor], list[OptionalTensor]]
"""Gradients with respect to the moved parameters, and to what is declared."""


class Direction(NamedTuple):
    """In which a gradient is differentiated."""

    along: Sequence[OptionalTensor]
    """One a moved parameter."""
    loss_bar: OptionalTensor
    """How many times the gradient itself is added, 0-d."""


class Sweep(ABC):
    """One way to the products."""

    def __init__(self, loop: Loop, declared: Sequence[Tensor]) -> None:
        self._loop, self._declared = loop, declared
        self._graph: Graph | None = None

    def gradient(self, carry: Carry, number: int) -> list[OptionalTensor]:
        """The inner gradient of a step, whose products are asked for next; one a leaf of the parameters."""
        return self._loop.gradient(carry, number, record=False).grads

    @abstractmethod
    def products(self, carry: Carry, number: int, direction: Direction) -> Products:
        """The gradients of ``sum(along * gradient) + loss_bar * loss``, at the start of the step of this number."""

    def forget(self) -> None:
        """Let go of the graph that :meth:`gradient` may have kept."""
        self._graph = None

    def _leaves(self, carry: Carry) -> tuple[list[Tensor], Carry]:
        """The moved parameters as leaves of a graph, and the carry with them."""
        model = self._loop.model
        params = leaves_at(carry.params, model.moved_places)
        tied = [params[place] for place in model.first_places]
        return [params[place] for place in model.moved_places], carry._replace(params=tied)


class ReverseOverReverse(Sweep):
    """By the graph of the gradient."""

    def gradient(self, carry: Carry, number: int) -> list[OptionalTensor]:
        """As :meth:`Sweep.gradient`, with the graph that the products need."""
        try:
            self._graph = graph_of(self._loop, carry, number)
        except CollectiveError:
            raise
        except Exception:  # it will come again, or is one of an operation without second derivative
            self._graph = None
        if self._graph is None:
            return super().gradient(carry, number)
        grads = [None if grad is None else grad.detach() for grad in self._graph.grads]
        if self._loop.ranks is not None:
            grads, _ = self._loop.ranks.mean_of_step(grads, self._graph.loss.detach())
        return put([None] * len(carry.params), self._loop.model.moved_places, grads)

    def products(self, carry: Carry, number: int, direction: Direction) -> Products:
        """See :meth:`Sweep.products`."""
        graph, self._graph = self._graph, None
        graph = graph or graph_of(self._loop, carry, number)
        return graph.products(*direction, self._declared)


class ForwardOverReverse(Sweep):
    """By the tangents of the gradient; block by block, where the loop has blocks."""

    formulas = False
    """Whether functions whose gradient has no forward mode compute by formulas."""

    def products(self, carry: Carry, number: int, direction: Direction) -> Products:
        """See :meth:`Sweep.products`."""
        loop = self._loop
        blocks = loop.blocks if isinstance(loop, BlockwiseLoop) else ()
        inputs, given = self._leaves(carry)
        of = {
            id(x): tangent for x, tangent in zip(inputs, direction.along, strict=True) if tangent is not None
        }
        wanted, tangents = [*inputs, *self._declared], Tangents(of, direction.loss_bar)
        with (
            torch.enable_grad(),
            Turn(exclusive=True),
            ForwardModeFormulas() if self.formulas else nullcontext(),
        ):
            found = sweep(
                loop, blocks, given.params, given.buffers, number, wanted, _keep_tangents, tangents
            ).grads
        return found[: len(inputs)], found[len(inputs) :]


class ForwardByFormulas(ForwardOverReverse):
    """The same, with formulas in the place of functions whose gradient has no forward mode."""

    formulas = True


class ByRecording(Sweep):
    """By the graph of the loss and of its gradient; the last resort, where an operation has no forward mode."""

    def products(self, carry: Carry, number: int, direction: Direction) -> Products:
        """See :meth:`Sweep.products`."""
        inputs, given = self._leaves(carry)
        alone = replace(self._loop, ranks=None)  # products are averaged when there are all of them
        found = alone.gradient(given, number, record=True)
        outputs = [*(found.grads[place] for place in self._loop.model.moved_places), found.loss]
        pulled = pulled_back(outputs, [*direction.along, direction.loss_bar], [*inputs, *self._declared])
        return pulled[: len(inputs)], pulled[len(inputs) :]


def sweeps_for(loop: Loop, declared: Sequence[Tensor], mode: SweepMode | None) -> list[Sweep]:
    """The ways to the products, the best first; where one fails, the next one is taken for good."""
    recording = ByRecording(loop, declared)
    if loop.is_compiled or any(leaf.is_complex() for leaf in loop.first.params):
        return [recording]
    forward = [ForwardOverReverse(loop, declared), ForwardByFormulas(loop, declared), recording]
    return [ReverseOverReverse(loop, declared), *forward] if mode == "reverse" else forward


def small_graph(loop: Loop, declared: Sequence[Tensor], loss: Tensor) -> list[Sweep]:
    """The way by a graph of a graph, where the graph of a step's loss is small."""
    moved = [loop.first.params[place] for place in loop.model.moved_places]
    room = max(SMALL, 2 * bytes_of([*moved, *pytree.flatten(loop.first.state)[0]]))
    is_small = sum(map(bytes_of_results, nodes_between([loss], []))) <= room
    if loop.ranks is not None:  # whose batches may have other sizes; a loss may send messages, in this order
        is_small = not loop.ranks.any(not is_small)
    return [ReverseOverReverse(loop, declared)] if is_small else []


def _keep_tangents(outputs: Sequence[Tensor], inputs: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    nodes = nodes_between(outputs, inputs)
    mend(nodes)
    if losing := next(filter(loses_tangents, (node.name() for node in nodes)), None):
        raise NoForwardModeError(f"{losing} has none")
