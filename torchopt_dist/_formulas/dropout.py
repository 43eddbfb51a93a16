"""``F.dropout`` on a GPU → by a formula whose gradient has a forward mode; the numbers are those of torch's kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["dropout"]


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeros in the places of some elements; torch's own but where that is the kernel without a forward mode."""
    if not (input.is_cuda and training and 0 < p < 1 and input.numel()):
        return F.dropout(input, p, training, inplace)
    values = input * kept(input, p) * (1 / (1 - p))
    return input.copy_(values) if inplace else values


def kept(input: Tensor, p: float) -> Tensor:
    """Where elements stay, as the kernel draws it."""
    mask: Tensor = torch.native_dropout(torch.ones_like(input), p, True)[1]
    return mask
