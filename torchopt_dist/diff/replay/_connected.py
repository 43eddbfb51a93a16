"""A tape → its loop's outcome, connected by one node, and by another node if its backward pass is differentiated."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist._torch_private import engine_keeps_graph
from torchopt_dist._types import OptionalTensor
from torchopt_dist.diff.adjoints._loop import Carry, Outcome
from torchopt_dist.diff.replay._tape import Kept, Tape
from torchopt_dist.diff.replay._twice import Trail

__all__ = ["connected"]


def connected(tape: Tape) -> Outcome:
    """Run a tape's loop, and connect its outcome."""
    inputs, joined = tape.inputs, tape.loop.joined
    if (
        tape.loop.others is not None
    ):  # views are of what a loop around this one has put in the places of these
        inputs = [tensor.view_as(tensor) for tensor in inputs]
    if joined is not None:
        inputs[len(inputs) - len(joined) :] = joined
    with torch.no_grad():  # and not in `forward` of the node, where torch switches forward mode off
        made = tape.run()
    given = _Given()
    outputs: tuple[Tensor, ...] = _Replay.apply(tape, given, made, *inputs)
    node = outputs[-1].grad_fn
    if node is not None:
        node.register_prehook(given.take)
    del made, node
    assert tape.outcome is not None
    model, (last, losses, aux) = tape.loop.model, tape.outcome
    params, (state, spec) = list(last.params), pytree.flatten(last.state)
    count = len(model.moved_places)
    for place, tensor in zip(model.moved_places, outputs[:count], strict=True):
        params[place] = tensor
    for place, tensor in zip(tape.places, outputs[count:-1], strict=True):
        state[place] = tensor
    carry = Carry(
        [params[place] for place in model.first_places], pytree.unflatten(spec, state), last.buffers
    )
    tape.outcome = Outcome(Carry([], None, []), losses, [])
    return Outcome(carry, list(outputs[-1].unbind()), aux)


class _Given(threading.local):
    """The gradients that a node is given. Torch's engine holds what it calls a node with until the node returns.

    So the engine has nothing to call the node with: the gradients are taken from it just before, and go one by one.
    """

    def __init__(self) -> None:
        self._bars: list[OptionalTensor] = []

    def take(self, bars: tuple[OptionalTensor, ...]) -> tuple[None, ...] | None:
        """Take the gradients, unless they have a graph."""
        if torch.is_grad_enabled():
            return None
        self._bars = list(bars)
        return (None,) * len(bars)

    def give(self) -> list[OptionalTensor]:
        """What was taken; nobody else has it."""
        bars, self._bars = self._bars, []
        return bars


class _Replay(torch.autograd.Function):
    """The node of a whole loop."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any, tape: Tape, given: _Given, made: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tape, ctx.given = tape, given
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *bars: OptionalTensor) -> tuple[OptionalTensor, ...]:
        with_graph = torch.is_grad_enabled()
        given = list(bars) if with_graph else ctx.given.give()
        tensors = (
            ctx.saved_tensors
        )  # an error of torch's where they were overwritten, or the graph was used up
        if all(bar is None for bar in given):
            return None, None, None, *[None] * len(tensors)
        if with_graph:
            return None, None, None, *_pulled(ctx.tape, tensors, given)
        kept = ctx.tape.kept.copy() if engine_keeps_graph() else ctx.tape.kept
        return None, None, None, *ctx.tape.pull(given, kept)


def _pulled(
    tape: Tape, tensors: Sequence[Tensor], bars: Sequence[OptionalTensor]
) -> Sequence[OptionalTensor]:
    """Gradients of a loop's outputs → of its inputs, connected to both."""
    assert tape.outcome is not None
    if not tape.outcome.losses:
        return [*bars[:-1], *[None] * (1 + len(tensors) - len(bars))]  # no step has moved anything
    trail: Trail = []
    kept = tape.kept.copy()
    with torch.no_grad():  # and not in `forward` of the node, as above
        given = [None if bar is None else bar.detach() for bar in bars]
        made = tape.pull(given, kept.copy(), trail)
    found: tuple[OptionalTensor, ...] = _Pull.apply(tape, kept, trail, made, *tensors, *bars)
    return found


class _Pull(torch.autograd.Function):
    """The node of a backward pass that is differentiated itself."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any,
        tape: Tape,
        kept: Kept,
        trail: Trail,
        made: list[OptionalTensor],
        *given: OptionalTensor,
    ) -> tuple[OptionalTensor, ...]:
        ctx.tape, ctx.kept, ctx.trail, ctx.count = tape, kept, trail, len(made)
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *cots: OptionalTensor) -> tuple[OptionalTensor, ...]:
        given = ctx.saved_tensors
        if all(cot is None for cot in cots):
            return None, None, None, None, *[None] * len(given)
        if not torch.is_grad_enabled():
            return None, None, None, None, *ctx.tape.pull_twice(ctx.kept, ctx.trail, cots)
        warnings.warn(
            "todist.Replayed() records all steps for a third derivative, which create_graph=True asks for where a "
            "second one is taken: the derivatives are the same, memory is that of todist.Recorded()",
            stacklevel=2,
        )
        found = ctx.tape.record_twice(given[: ctx.count], given[ctx.count :], cots)
        return None, None, None, None, *found
