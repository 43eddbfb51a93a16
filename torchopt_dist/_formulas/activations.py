"""``F.silu`` and ``F.mish`` → by formulas whose gradient has a forward mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["mish", "silu"]


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """``x * sigmoid(x)``."""
    values = input * torch.sigmoid(input)
    return input.copy_(values) if inplace else values


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """``x * tanh(softplus(x))``."""
    values = input * torch.tanh(F.softplus(input))
    return input.copy_(values) if inplace else values
