"""Estimated gradients → the same, with a history that raises an error if they are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.torch_private import transforms_are_active

__all__ = ["without_second_order"]


def without_second_order(
    what: str, grads: Sequence[OptionalTensor], inputs: Sequence[Tensor]
) -> tuple[OptionalTensor, ...]:
    """Give gradients a history that raises an error in a backward pass, where a graph is recorded.

    Args:
        what: the name of the adjoint, for the error.
        grads: the gradients that a backward pass has found.
        inputs: what they are functions of.

    Returns:
        The same values; inside ``torch.func``'s transforms, which only `Reptile` takes, as they are.
    """
    if not torch.is_grad_enabled() or transforms_are_active():
        return tuple(grads)
    there = [grad.detach().requires_grad_() for grad in grads if grad is not None]
    of = [tensor for tensor in inputs if tensor.requires_grad]
    made = iter(_Refused.apply(what, len(there), *there, *of) if there else ())
    return tuple(None if grad is None else next(made) for grad in grads)


class _Refused(torch.autograd.Function):
    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, what: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.what = what
        return tuple(grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *bars: OptionalTensor) -> Any:
        raise NotImplementedError(
            f"the gradient of `{ctx.what}` is an estimate that cannot be differentiated itself: take `Recorded()`, "
            "`Replayed()` or `Implicit()` where a second derivative is wanted, or detach the gradient"
        )
