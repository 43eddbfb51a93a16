"""A loop → its outcome, connected through its last step, with the derivative of the gradient by a finite difference.

With ``c`` the outer gradient of the new parameters and ``v = (∂update/∂g)ᵀ c``, by the optimizer's own Jacobian, the
product ``vᵀ ∂g/∂meta`` is the derivative of ``∂loss/∂meta`` along ``v``, since ``g = ∂loss/∂θ``: a difference of two
first-order gradients. No second-order graph is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.core.random_turns import Turn, kept_generators
from torchopt_dist.core.rows import in_rows
from torchopt_dist.core.surroundings import Modes, modes
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vmap import Samples, Values
from torchopt_dist.diff.adjoints._checks import refusal_as_it_is, watched
from torchopt_dist.diff.adjoints._estimates import without_second_order
from torchopt_dist.diff.adjoints._loop import Carry, Evaluation, Loop, Outcome
from torchopt_dist.torch_private import apply_function, grad_of_loss, has_hooks

__all__ = ["run_with_differences"]

_WIDE = frozenset({torch.float32, torch.float64})


def run_with_differences(
    loop: Loop, radius: float, what: str, around: Samples, *, at_the_end: bool
) -> Outcome:
    """Train without a graph, and connect the last step.

    Args:
        loop: the loop to run.
        radius: the distance of the two points from the point between them, in the norm of all parameters together.
        what: the name of the adjoint, for errors.
        around: the samples of the ``vmap`` around the loop; each task has a distance of its own.
        at_the_end: whether the point between them is that of the parameters after the last step, or before it.

    Returns:
        The outcome. Its parameters and its state are connected with what the loop has declared.
    """
    as_they_are = not (loop.is_substituted or around.levels) and all(
        tensor.is_leaf and not has_hooks(tensor) for tensor in loop.declared
    )
    seen, watch = (loop, refusal_as_it_is(loop)) if as_they_are else (watched(loop, around), None)
    # Only steps before the last are made in place, and only `FiniteDifference` comes back to where the last one starts.
    alone = at_the_end and not around.levels and (loop.steps == 1 or loop.stop is not None)
    first = loop.without_history(loop.first) if alone else loop.own(loop.first)
    last: list[tuple[Carry, Evaluation, int]] = []

    def step(carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        if loop.stop is None and number < loop.steps - 1:
            return loop.training_step(carry, number)
        found = seen.gradient(carry, number, record=False, watch=watch)
        last[:] = [(carry, found, number)]
        if number == loop.steps - 1:
            return connected(carry, found, number), found.loss, found.aux
        return loop.moved(carry, found, record=False), found.loss, found.aux

    def connected(carry: Carry, found: Evaluation, number: int) -> Carry:
        places = [place for place, grad in enumerate(found.grads) if grad is not None]
        grads = list(found.grads)
        taken = [grad for grad in found.grads if grad is not None]
        declared: Sequence[Tensor] = loop.declared
        if loop.is_substituted:  # a view is of what a loop around this one has put in the places of these
            declared = [tensor.view_as(tensor) for tensor in declared]
        held: list[Values] = []
        given: list[Values] = []
        if around.levels:
            held, given = around.values_of_each(taken), around.values(declared)
            taken, declared = [one.values for one in held], [one.values for one in given]
        between = _Between(
            loop, number, radius, places, carry, around, held, given, modes(), what, as_they_are
        )
        with around.outside():
            connection = apply_function(_Differences, between, taken, *declared)
        for place, grad in zip(places, around.tensors(held, connection), strict=True):
            grads[place] = grad
        still = list(carry.params)
        for place in loop.model.moved_places:
            still[place] = still[place].detach()
        still_carry = Carry(still, carry.state, carry.buffers)
        moved = loop.moved(still_carry, Evaluation(found.loss, found.aux, grads, found.buffers), record=True)
        if at_the_end:
            between.carry = moved
        between.carry = Carry([leaf.detach() for leaf in between.carry.params], (), between.carry.buffers)
        return moved if around.levels else moved._replace(params=_still_moved(loop, moved.params))

    outcome = loop.run(step, first)
    if 0 < len(outcome.losses) < loop.steps:  # `stop` has said so after the step
        return outcome._replace(carry=connected(*last[0]))
    return outcome


def _still_moved(loop: Loop, params: Sequence[Tensor]) -> list[Tensor]:
    """The parameters, of which those that the last loss did not use require grad: a loop after this one moves them."""
    found = list(params)
    for place in loop.model.moved_places:
        if not found[place].requires_grad:
            found[place] = found[place].detach().requires_grad_()
    return [found[place] for place in loop.model.first_places]


@dataclass
class _Between:
    """The point between the two, and the step whose loss is differentiated at both."""

    loop: Loop
    number: int
    radius: float
    places: list[int]
    """Of the parameters that have a gradient."""
    carry: Carry
    """The point, without history and without a state."""
    around: Samples
    grads: list[Values]
    """Inside ``vmap``, the gradients of the step; a direction has the shape of its gradient."""
    declared: list[Values]
    """Inside ``vmap``, what the loop has declared."""
    modes: Modes
    what: str
    """The adjoint, for errors."""
    as_they_are: bool
    """Whether gradients are taken for the declared tensors themselves, with nothing in their places."""

    def gradients(
        self, directions: Sequence[Tensor], given: list[Tensor], loop: Loop
    ) -> list[OptionalTensor]:
        """The derivative, along directions, of the loss's gradients with respect to tensors that are declared."""
        if self.around.levels:
            (length,) = self.around.again(lambda: [_norm(self.around.tensors(self.grads, directions))])
        else:
            length = _norm(directions)
        distance = self._distance(length, directions)
        weight = length / (2 * self.radius)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        with kept_generators(), self.modes.again(), torch.set_grad_enabled(True), Turn(exclusive=True):
            ahead = self._side(directions, distance, weight, given, wanted, loop)
            behind = self._side(directions, -distance, weight, given, wanted, loop)
        found: list[OptionalTensor] = [
            None if a is None or b is None else a - b for a, b in zip(ahead, behind, strict=True)
        ]
        if len(found) == len(given):
            return found
        rest = iter(found)
        return [next(rest) if tensor.requires_grad else None for tensor in given]

    def _distance(self, length: Tensor, directions: Sequence[Tensor]) -> Tensor | float:
        """The factor of the directions; a number where that gives the same products and can be looked at."""
        if not self.around.levels and length.is_cpu and _WIDE.issuperset([v.dtype for v in directions]):
            norm = length.item()
            return self.radius / (norm if norm > 0 else 1.0)
        return self.radius / torch.where(length > 0, length, 1.0)

    def _side(
        self,
        directions: Sequence[Tensor],
        distance: Tensor | float,
        weight: Tensor,
        given: Sequence[Tensor],
        wanted: list[Tensor],
        loop: Loop,
    ) -> Sequence[OptionalTensor]:
        """The gradient at a distance from the point, times a weight for each task."""
        if self.around.levels:
            (loss,) = self.around.again(lambda: [self._loss_of_each(directions, distance, given, loop)])
        else:
            loss = self._loss(directions, distance, given, loop)
        if not loss.requires_grad:
            return [None] * len(wanted)
        return grad_of_loss(loss, wanted, weight.to(loss))

    def _loss_of_each(
        self, directions: Sequence[Tensor], distance: Tensor | float, given: Sequence[Tensor], loop: Loop
    ) -> Tensor:
        apart = self.around.stacked(distance).tensor() if isinstance(distance, Tensor) else distance
        return self._loss(self.around.tensors(self.grads, directions), apart, given, loop)

    def _loss(
        self, directions: Sequence[Tensor], distance: Tensor | float, given: Sequence[Tensor], loop: Loop
    ) -> Tensor:
        if loop.others is not None:
            loop = replace(loop, others=tuple(self.around.tensors(self.declared, given)))
        params = list(self.carry.params)
        for place, v in zip(self.places, directions, strict=True):
            if isinstance(distance, Tensor):
                params[place] = params[place] + distance.to(v) * v
            else:
                params[place] = params[place].add(v, alpha=distance)
        if not self.around.levels:
            for place in loop.model.moved_places:
                leaf = params[place]
                params[place] = (leaf.detach() if leaf is self.carry.params[place] else leaf).requires_grad_()
        tied = [params[place] for place in loop.model.first_places]
        loss: Tensor = loop.evaluate(tied, self.carry.buffers, self.number)[0]
        return loss.reshape(()) if loss.ndim else loss


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all tensors together, 0-d."""
    if len(tensors) == 1:
        return _norm_of_one(tensors[0])
    return torch.linalg.vector_norm(torch.stack([_norm_of_one(tensor) for tensor in tensors]))


def _norm_of_one(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float64:
        return torch.linalg.vector_norm(tensor)
    return torch.linalg.vector_norm(tensor, dtype=torch.complex128 if tensor.is_complex() else torch.float64)


class _Differences(torch.autograd.Function):
    """The gradients of a step as a function of what is declared."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, between: _Between, grads: list[Tensor], *declared: Tensor) -> tuple[Tensor, ...]:
        ctx.between = between
        ctx.save_for_backward(*declared)
        return tuple(grads)

    @staticmethod
    @in_rows
    def backward(ctx: Any, *directions: Tensor) -> tuple[OptionalTensor, ...]:
        between, saved = ctx.between, ctx.saved_tensors  # an error of torch's where one was overwritten
        given, loop = list(between.loop.declared), between.loop
        if not between.as_they_are:
            given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in saved]
            loop = replace(loop, others=tuple(given))
        directions = tuple([v.detach() if v.requires_grad else v for v in directions])
        with loop.failing():
            found = between.gradients(directions, given, loop)
        return None, None, *without_second_order(between.what, found, saved)
