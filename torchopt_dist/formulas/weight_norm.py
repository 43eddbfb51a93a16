"""``weight_norm``, its gradient → the same with derivatives of every order.

Torch (2.13) differentiates its gradient by a formula that takes the norms for constants. ``w = g · v / ‖v‖``, from
Salimans and Kingma, "Weight normalization", 2016, whose equation 3 is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["scaled_to", "weight_norm", "weight_norm_backward"]


def weight_norm(torchs: Callable[..., Tensor], v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """By the formula."""
    del torchs
    return scaled_to(v, g, dim)


def scaled_to(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """The formula."""
    return v * (g / _norm(v, dim))


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The gradients of ``v`` and ``g``, made of differentiable operations."""
    norm = _norm(v, dim)
    unit = v / norm
    along = _summed(grad * unit, dim)
    return g / norm * (grad - unit * along), along


def _norm(v: Tensor, dim: int) -> Tensor:
    """Of what each index of the dimension has; of everything for -1, as ``norm_except_dim`` has it."""
    return torch.linalg.vector_norm(v) if dim == -1 else _summed(v.square(), dim).sqrt()


def _summed(x: Tensor, dim: int) -> Tensor:
    if dim == -1:
        return x.sum()
    others = [other for other in range(x.ndim) if other != dim]
    return x.sum(others, keepdim=True) if others else x
