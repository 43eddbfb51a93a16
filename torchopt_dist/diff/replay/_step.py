"""The gradients of a step's results → those of its inputs, and of all other tensors that the step uses.

With ``u`` the gradient of the inner gradient, by way of the update's own derivative, one sweep through the inner loss
along ``u`` gives the product with the Hessian and the mixed products with all that the loss is made of (`_sweeps.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import plus, pulled_back
from torchopt_dist.diff.adjoints._declared import leaf_like, leaf_of, nodes_between
from torchopt_dist.diff.adjoints._loop import Carry, Evaluation, Loop
from torchopt_dist.diff.adjoints._undeclared import refuse
from torchopt_dist.diff.replay._blockwise import BlockwiseLoop
from torchopt_dist.diff.replay._links import through_links
from torchopt_dist.diff.replay._own_memory import add_to, apart_from, own, room_like
from torchopt_dist.diff.replay._places import portions
from torchopt_dist.diff.replay._sweeps import ByRecording, Direction, SweepMode, small_graph, sweeps_for
from torchopt_dist.errors import CollectiveError
from torchopt_dist.ops._columns import put
from torchopt_dist.transform._pulled_step import Room, StepBars
from torchopt_dist.transform.apply_updates import parts_of, pulls_in_place, step_pulled_back

__all__ = ["Bars", "Start", "StepGradient"]


class Start(NamedTuple):
    """What a step starts from."""

    number: int
    """Of the step."""
    carry: Carry
    grads: list[OptionalTensor] | None
    """The inner gradient, if it is known."""


class Bars(NamedTuple):
    """Gradients with respect to the carry after a step; ``None`` for zero."""

    params: list[OptionalTensor]
    """One a moved parameter."""
    state: list[OptionalTensor]
    """One a leaf of the state at :func:`~torchopt_dist.diff.replay._places.state_places`."""
    are_own: bool = False
    """Nobody else has their memory, and no two of them share theirs."""


class StepGradient:
    """The backward of single steps.

    Args:
        loop: the loop.
        places: the places in the state, from :func:`~torchopt_dist.diff.replay._places.state_places`.
        declared: tensors for which the gradient is summed over the steps.
        sweep: the mode of the outer derivative of the loss; ``None``: it is chosen by the first step.
    """

    def __init__(
        self, loop: Loop, places: Sequence[int], declared: Sequence[Tensor], sweep: SweepMode | None
    ) -> None:
        self._loop, self._places, self._declared = loop, places, declared
        by_blocks = isinstance(loop, BlockwiseLoop)  # where memory is worth more than time
        self._portions = portions(loop, 8 if by_blocks else 1)
        self._sweeps = sweeps_for(loop, declared, sweep)
        self._room: Room | None = None
        self._links, self._optimizer = parts_of(loop.optimizer)
        self._in_place = not by_blocks and pulls_in_place(self._optimizer)
        self._chooses = sweep is None and not by_blocks and len(self._sweeps) > 1

    def choose(self, loss: Tensor) -> None:
        """Choose the mode of the sweep by the graph of the first step's loss, unless the caller has chosen."""
        if self._chooses:
            self._chooses = False
            self._sweeps = [*small_graph(self._loop, self._declared, loss), *self._sweeps]

    def pull(
        self, start: list[Start], bars: Bars, loss_bar: OptionalTensor, *, overwrite: bool = False
    ) -> tuple[Bars, list[OptionalTensor]]:
        """Differentiate one step.

        Args:
            start: what the step started from, in a list from which it is taken.
            bars: gradients of the carry after it; they are used up.
            loss_bar: gradient of its loss, 0-d.
            overwrite: whether the memory of ``bars`` may be overwritten.

        Returns:
            The gradients of its start, and one for each declared tensor.
        """
        # What is no longer needed is let go at once: copies of all parameters are much of the memory.
        number, carry, grads = start.pop()
        # Ranks send the same messages in each way, since one of them may come to this one alone.
        if isinstance(self._sweeps[0], ByRecording) and self._loop.ranks is None:
            return self._recorded(carry, number, bars, loss_bar)
        if grads is None:
            grads = self._sweeps[0].gradient(carry, number)
        before, direct, through = self._through_update(carry, bars, list(grads), overwrite)
        if loss_bar is None and all(bar is None for bar in through):
            self._sweeps[0].forget()
            return before, direct
        del grads
        carry = carry._replace(state=None)
        bars.params.clear()
        bars.state.clear()
        along, mixed = self._products(carry, number, Direction(through, loss_bar))
        sum_of = add_to if before.are_own else plus
        for place, more in enumerate(along):
            before.params[place], along[place] = sum_of(before.params[place], more), None
        if before.are_own and self._room is not None:
            mixed = [apart_from(self._room.grads, bar) for bar in mixed]
        if self._loop.ranks is not None:  # the products of all ranks; the rest is the same on all of them
            before.params[:] = self._loop.ranks.mean_of_products(before.params)
        return before, [plus(a, b) for a, b in zip(direct, mixed, strict=True)]

    def inputs(self, carry: Carry) -> tuple[Carry, list[Tensor]]:
        """The same values as leaves of a graph, and these leaves: of the parameters, then of the state."""
        return self._loop.as_leaves(carry, self._places)

    def outputs(self, carry: Carry) -> list[Tensor]:
        """The tensors of a carry that may have a gradient: parameters, then leaves of the state."""
        return self._loop.with_gradient(carry, self._places)

    def _through_update(
        self,
        carry: Carry,
        bars: Bars,
        grads: list[OptionalTensor],
        overwrite: bool,
    ) -> tuple[Bars, list[OptionalTensor], list[OptionalTensor]]:
        room = None
        if overwrite and self._in_place:
            room = self._room = self._room or room_like(carry.params, self._loop.model.moved_places)
        if room is not None and not bars.are_own:
            bars = Bars([own(bar) for bar in bars.params], [own(bar) for bar in bars.state], True)
        known = self._by_derivative(carry, bars, grads, room)
        if known is not None:
            return known
        given, inputs = self.inputs(carry)
        leaves = [None if grad is None else leaf_like(grad) for grad in grads]
        after = self._loop.moved(given, Evaluation(given.params[0], None, leaves, []), record=True)
        at = [leaves[place] for place in self._loop.model.moved_places]
        there = [leaf for leaf in at if leaf is not None]
        outputs = self.outputs(after)
        refuse(self.undeclared(outputs, [*inputs, *there]))
        found = pulled_back(outputs, [*bars.params, *bars.state], [*inputs, *there, *self._declared])
        count, more = len(bars.params), len(inputs)
        rest = iter(found[more:])
        through = [None if leaf is None else next(rest) for leaf in at]
        return Bars(found[:count], found[count:more]), list(rest), through

    def _by_derivative(
        self,
        carry: Carry,
        bars: Bars,
        grads: list[OptionalTensor],
        room: Room | None,
    ) -> tuple[Bars, list[OptionalTensor], list[OptionalTensor]] | None:
        """As :meth:`_through_update`, by the derivative that comes with the optimizer's step, if one does.

        It is one of each parameter by itself, and where memory is short, of some parameters after others: what they had
        makes room for what they get.
        """
        model, places = self._loop.model, self._loop.model.moved_places
        state, links = carry.state, None
        if self._links is not None:
            links = through_links(self._loop, self._links, carry, grads)
            if links is None:
                return None
            refuse(self.undeclared(links.outputs, links.inputs))
            grads, state = links.grads, state[len(self._links.transformations) :]
        leaves = pytree.flatten(state)[0]
        through: list[OptionalTensor] = [None] * len(carry.params)
        direct: list[OptionalTensor] = [None] * len(self._declared)
        nothing = all(bar is None for bar in (*bars.params, *bars.state))
        for portion in self._portions:
            of_params: list[OptionalTensor] = put([None] * len(carry.params), places, bars.params)
            of_state: list[OptionalTensor] = put([None] * len(leaves), self._places, bars.state)
            with self._loop.substituted():
                pulled = step_pulled_back(
                    self._optimizer,
                    model.tree(carry.params),
                    model.tree([grad if place in portion else None for place, grad in enumerate(grads)]),
                    state,
                    StepBars(of_params, of_state),
                    room,
                )
            if pulled is None:
                return None
            (before, of_grads, lr, known), of_lr = pulled
            if room is not None:
                self._in_place = nothing or known is not None
            bars.params[:] = [before.params[place] for place in places]
            bars.state[:] = [before.state[place] for place in self._places]
            for place in portion:
                through[place], grads[place] = of_grads[place], None
            if lr is not None:
                refuse(self.undeclared([lr], []))
                more = pulled_back([lr], [of_lr], self._declared)
                direct = [plus(a, b) for a, b in zip(direct, more, strict=True)]
        are_own = room is not None and self._in_place
        pulled_bars = Bars(list(bars.params), list(bars.state), are_own)
        of_moved = [through[place] for place in places]
        if links is None:
            return pulled_bars, direct, of_moved
        of_moved, of_params, more = links.pull(of_moved, self._declared)
        for place, of_param in enumerate(of_params):
            pulled_bars.params[place] = (add_to if are_own else plus)(pulled_bars.params[place], of_param)
        return pulled_bars, [plus(a, b) for a, b in zip(direct, more, strict=True)], of_moved

    def _products(
        self, carry: Carry, number: int, direction: Direction
    ) -> tuple[list[OptionalTensor], list[OptionalTensor]]:
        while len(self._sweeps) > 1:
            try:
                return self._sweeps[0].products(carry, number, direction)
            except CollectiveError:  # of a loss that sends messages
                raise
            except Exception as error:  # the loss has been called like this before, without forward mode
                del self._sweeps[0]
                if len(self._sweeps) == 1:
                    warnings.warn(
                        "steps of an inner loop are recorded one by one in backward, since an operation in the loss "
                        f"has no gradient in forward mode: {str(error).strip().splitlines()[0]}",
                        stacklevel=3,
                    )
        return self._sweeps[0].products(carry, number, direction)

    def _recorded(
        self, carry: Carry, number: int, bars: Bars, loss_bar: OptionalTensor
    ) -> tuple[Bars, list[OptionalTensor]]:
        weights = [*bars.params, *bars.state, loss_bar]
        pulled = self._loop.pulled_step(carry, number, self._places, self._declared, weights)
        count, more = len(bars.params), len(bars.params) + len(bars.state)
        return Bars(pulled[:count], pulled[count:more]), pulled[more:]

    def undeclared(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Leaves that require grad, on which outputs depend, and that are neither inputs nor declared."""
        given = [*inputs, *self._declared]
        known = {id(one) for one in given}
        nodes = nodes_between(outputs, [one for one in given if one.grad_fn is not None])  # others are leaves
        found = [leaf for node in nodes if (leaf := leaf_of(node)) is not None]
        return [leaf for leaf in found if id(leaf) not in known]
