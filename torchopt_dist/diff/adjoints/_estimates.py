"""A setting of an adjoint that estimates, its gradients → the same, or an error: of its range, and of a second order.

The gradients have a history that raises an error if they are differentiated.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.core.graphs import graph_is_recorded
from torchopt_dist.core.types import OptionalTensor

__all__ = ["check_above_zero", "without_second_order"]


def check_above_zero(name: str, value: Any) -> None:
    """Check that a setting is a finite number above 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of its range.
    """
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}")
    if not (float(value) > 0 and math.isfinite(value)):
        raise ValueError(f"`{name}` must be finite and above 0, got {value}")


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
    if not graph_is_recorded():
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
