"""A loop → its outcome, whose gradient is the displacement of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.diff.adjoints._checks import run_aloud
from torchopt_dist.diff.adjoints._declared import tensors_within
from torchopt_dist.diff.adjoints._estimates import without_second_order
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints.adjoint import Adjoint

__all__ = ["Reptile"]


@dataclass(frozen=True)
class Reptile(Adjoint):
    """The gradient of the initial parameters is their displacement, initial minus last (Nichol et al., 2018).

    It is the same for every outer loss that depends on the last parameters: a step of SGD with learning rate ``e``
    moves the initial parameters by the fraction ``e`` of the way to the last ones. The gradients of several tasks add
    up; to average them, divide the learning rate. Nothing else has a gradient, and losses are not connected. A backward
    pass raises a ``ValueError`` for what ``meta`` lists, or a hyper-parameter, if only the inner loop uses it.
    """

    runs_again: ClassVar[bool] = False

    @property
    def batches_again(self) -> int:
        """Each batch is read once."""
        return 0

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        return run_aloud("Reptile", self._run, loop, tensors_within(loop.optimizer))

    def _run(self, loop: Loop) -> Outcome:
        outcome = loop.run(loop.training_step, loop.own(loop.first))
        if not torch.is_grad_enabled():
            return outcome
        places = loop.model.moved_places
        last = outcome.carry.params
        connected = _Displacement.apply(
            *(loop.first.params[place].view_as(last[place]) for place in places),
            *(last[place] for place in places),
        )
        return outcome.with_moved(loop.model, connected)


class _Displacement(torch.autograd.Function):
    apply: ClassVar[Any]
    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[len(tensors) // 2 :])

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        count = len(tensors) // 2
        moved = tuple(
            (first - last).detach() for first, last in zip(tensors[:count], tensors[count:], strict=True)
        )
        return (*without_second_order("Reptile", moved, tensors), *[None] * count)
