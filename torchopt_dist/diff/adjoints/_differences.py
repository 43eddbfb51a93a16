"""A loop → its outcome, connected by its last step, in which the gradient's derivative is taken from two values nearby.

With ``c`` the outer gradient of the new parameters and ``v = (∂update/∂g)ᵀ c``, by the optimizer's own Jacobian, the
product ``vᵀ ∂g/∂meta`` is the derivative of ``∂loss/∂meta`` along ``v``, since ``g = ∂loss/∂θ``: a difference of two
first-order gradients. No second-order graph is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.diff.adjoints._loop import Carry, Evaluation, Loop, Outcome
from torchopt_dist.diff.adjoints._randomness import kept_generators
from torchopt_dist.diff.adjoints._second_order import without_second_order
from torchopt_dist.diff.adjoints._undeclared import refuse_undeclared, watched
from torchopt_dist.typing import OptionalTensor

__all__ = ["run_with_differences"]


def run_with_differences(loop: Loop, radius: float, what: str, *, at_the_end: bool) -> Outcome:
    """Train without a graph, and connect the last step.

    Args:
        loop: what to run.
        radius: the distance, in the norm of all parameters together, of the two points from that between them.
        what: the adjoint, for errors.
        at_the_end: that is where the parameters are after the last step; otherwise, before.

    Returns:
        The outcome. Its parameters and its state are connected with what the loop has declared.
    """
    seen = watched(loop)
    last: list[tuple[Carry, Evaluation, int]] = []

    def step(carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        if loop.stop is None and number < loop.steps - 1:
            return (seen if number == 0 else loop).training_step(carry, number)
        found = (seen if number == 0 else loop).gradient(carry, number, record=False)
        last[:] = [(carry, found, number)]
        if number == loop.steps - 1:
            return connected(carry, found, number), found.loss, found.aux
        return loop.moved(carry, found, record=False), found.loss, found.aux

    def connected(carry: Carry, found: Evaluation, number: int) -> Carry:
        places = [place for place, grad in enumerate(found.grads) if grad is not None]
        between = _Between(loop, number, radius, places, carry, what)
        grads = list(found.grads)
        connection = _Differences.apply(between, [grads[place] for place in places], *loop.declared)
        for place, grad in zip(places, connection, strict=True):
            grads[place] = grad
        still = list(carry.params)
        for place in loop.model.moved_places:
            still[place] = still[place].detach()
        moved = loop.moved(carry._replace(params=still), found._replace(grads=grads), record=True)
        if at_the_end:
            between.carry = loop.cut(moved)
        return moved

    outcome = loop.run(step, loop.own(loop.first))
    if 0 < len(outcome.losses) < loop.steps:  # `stop` has said so after the step
        return outcome._replace(carry=connected(*last[0]))
    return outcome


@dataclass
class _Between:
    """A point, and which step's loss is differentiated at both sides of it."""

    loop: Loop
    number: int
    radius: float
    places: list[int]
    """Of the parameters that have a gradient."""
    carry: Carry
    what: str
    """The adjoint, for errors."""

    def gradients(self, directions: list[Tensor], given: list[Tensor]) -> list[OptionalTensor]:
        """The derivative, along directions, of the loss's gradients with respect to tensors that are declared."""
        length = torch.stack([v.double().square().sum() for v in directions]).sum().sqrt()
        if not bool(length > 0):
            return [None] * len(given)
        distance = self.radius / length
        sides = [self._side(directions, distance * sign, given, checked=sign > 0) for sign in (1, -1)]
        return [
            None
            if ahead is None or behind is None
            else (ahead - behind) / (2 * distance).to(device=ahead.device, dtype=ahead.dtype)
            for ahead, behind in zip(*sides, strict=True)
        ]

    def _side(
        self, directions: list[Tensor], distance: Tensor, given: list[Tensor], *, checked: bool
    ) -> tuple[OptionalTensor, ...]:
        params = list(self.carry.params)
        for place, v in zip(self.places, directions, strict=True):
            params[place] = params[place] + distance.to(device=v.device, dtype=v.dtype) * v
        loop = replace(self.loop, others=tuple(given))
        carry = loop.cut(self.carry._replace(params=params))
        with torch.enable_grad(), kept_generators():
            loss, _, _ = loop.evaluate(carry.params, carry.buffers, self.number)
            if checked:
                refuse_undeclared(loop, carry, self.number, loss, carry.params)
            if not loss.requires_grad:
                return (None,) * len(given)
            return torch.autograd.grad(loss, given, torch.ones_like(loss), allow_unused=True)


class _Differences(torch.autograd.Function):
    """The gradients of a step as a function of what is declared."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, between: _Between, grads: list[Tensor], *declared: Tensor) -> tuple[Tensor, ...]:
        ctx.between = between
        ctx.save_for_backward(*declared)
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[OptionalTensor, ...]:
        wanted = ctx.needs_input_grad[2:]
        given = [
            tensor.detach().requires_grad_(is_wanted)
            for tensor, is_wanted in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.no_grad():
            found = ctx.between.gradients([direction.detach() for direction in directions], given)
        return None, None, *without_second_order(ctx.between.what, found)
