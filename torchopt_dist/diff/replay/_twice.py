"""A tape, gradients of its outputs → gradients of its inputs, which can be differentiated once more.

A replayed backward pass is a chain of steps itself: ``(λ_t, φ̄_t) = P_t(θ_t, λ_{t+1}, φ)``, where ``θ_t`` is what step
``t`` starts from, ``λ_t`` its gradient, and ``φ`` is what is declared. Its own backward pass begins with the first step
and needs each ``λ``, which is kept; the gradients of each ``θ`` then go back through the loop as in any replay. Each
step is recorded by itself, twice differentiable, so there is never more than one step's graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import plus, pulled_back
from torchopt_dist.diff.adjoints._declared import leaf_like
from torchopt_dist.diff.adjoints._loop import Carry, Loop
from torchopt_dist.diff.replay._step import Bars, StepGradient

__all__ = ["Trail", "back_through_pull"]

Column = list[OptionalTensor]
Trail = list[tuple[Bars, OptionalTensor]]
"""Of each step, the first one first, the gradients that a backward pass had of what it handed on, and of its loss."""


def back_through_pull(
    loop: Loop,
    gradient: StepGradient,
    declared: Sequence[Tensor],
    carry: Carry,
    trail: Trail,
    cots: Sequence[OptionalTensor],
) -> tuple[list[Bars], Column, Bars, Column]:
    """Gradients of what a backward pass has found → of what it was made of, but for the steps' first derivatives.

    Args:
        loop: the loop of the backward pass.
        gradient: the gradients of its steps.
        declared: the tensors in the place of the declared ones.
        carry: the start of the first step.
        trail: what the pass had; of one step at least.
        cots: gradients of the gradients of the first parameters, of the first state, and of each that is declared.

    Returns:
        What each step's start gets, which is to be gone back through; what each that is declared gets; what the
        gradients of the last parameters and state get, and those of the losses.
    """
    count = len(loop.model.moved_places)
    size = len(trail[0][0].params) + len(trail[0][0].state)
    more = size + len(declared)
    now, of_declared = list(cots[:size]), list(cots[size:])
    totals: Column = [None] * len(declared)
    starts: list[Bars] = []
    of_losses: Column = []
    for number, (bars, loss_bar) in enumerate(trail):
        with torch.enable_grad():
            given, inputs = gradient.inputs(carry)
            found = loop.gradient(given, number, record=True)
            after = loop.moved(given, found, record=True)
            outputs = [*gradient.outputs(after), found.loss]
            weights = [
                None if bar is None else leaf_like(bar) for bar in (*bars.params, *bars.state, loss_bar)
            ]
            pulled = pulled_back(outputs, weights, [*inputs, *declared], create_graph=True)
        carry = loop.cut(after)
        there = [weight for weight in weights if weight is not None]
        got = pulled_back(pulled, [*now, *of_declared], [*inputs, *declared, *there])
        starts.append(Bars(got[:count], got[count:size]))
        totals = [plus(a, b) for a, b in zip(totals, got[size:more], strict=True)]
        rest = iter(got[more:])
        *now, of_loss = (None if weight is None else next(rest) for weight in weights)
        of_losses.append(of_loss)
    return starts, totals, Bars(now[:count], now[count:]), of_losses
