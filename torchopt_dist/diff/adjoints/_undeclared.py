"""A loop → the same, which finds out whether its loss uses tensors that require grad and that nobody has declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchopt_dist.diff.adjoints._declared import leaf_of, nodes_between
from torchopt_dist.diff.adjoints._loop import Carry, Loop
from torchopt_dist.diff.replay._step import refuse

__all__ = ["refuse_undeclared", "watched"]


def watched(loop: Loop) -> Loop:
    """The same loop to run one step of: other tensors stand in the places of those declared, and it is looked at.

    An adjoint that exchanges tensors in a backward pass needs it: whatever else the loss depends on would have no
    gradient, and nobody would be told.

    Raises:
        ValueError: in a step, the loss depends on another leaf that requires grad.
    """
    exchanged = replace(loop, others=tuple(tensor.detach().requires_grad_() for tensor in loop.declared))

    def watch(
        carry: Carry,
        number: int,
        outputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> None:
        refuse_undeclared(exchanged, carry, number, outputs[0], leaves)

    return replace(exchanged, watch=watch)


def refuse_undeclared(loop: Loop, carry: Carry, number: int, loss: Tensor, leaves: Sequence[Tensor]) -> None:
    """Demand that a step's loss depends on no leaves but by way of the parameters and of what is declared.

    Args:
        loop: one in which other tensors stand in the places of those declared.
        carry: what the step starts from.
        number: of the step.
        loss: as it was evaluated.
        leaves: parameters it was evaluated at.

    Raises:
        ValueError: it depends on another leaf that requires grad.
    """
    found = _leaves(loss, [*leaves, *(loop.others or ())])
    if found:  # unless the loss has made them, which makes others each time
        with torch.enable_grad():
            again, _, _ = loop.evaluate(carry.params, carry.buffers, number)
        still = {id(leaf) for leaf in _leaves(again, [])}
        refuse([leaf for leaf in found if id(leaf) in still])


def _leaves(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [leaf for node in nodes_between([output], inputs) if (leaf := leaf_of(node)) is not None]
