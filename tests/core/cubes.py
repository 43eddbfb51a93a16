"""The third power as a function of its own, differentiable as often as one likes, or once."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class CubeOfOperations(torch.autograd.Function):
    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Cube(CubeOfOperations):
    """As many extensions write it."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return CubeOfOperations.backward(ctx, grad)
