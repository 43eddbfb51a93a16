"""Tensors that an operation is given → whether a formula takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchopt_dist._torch_private import transforms_are_active
from torchopt_dist._types import OptionalTensor

__all__ = ["fit_short_formula", "need_formula"]


def need_formula(input: Tensor) -> bool:
    """Whether a transform is active, and the formula has torch's precision."""
    return transforms_are_active() and input.dtype in (torch.float32, torch.float64)


def fit_short_formula(*tensors: OptionalTensor) -> bool:
    """Whether they are plain, of one type that is not short, and not in a transform or autocast."""
    there = [x for x in tensors if x is not None]
    return (
        all(type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided for x in there)
        and {x.dtype for x in there} in ({torch.float32}, {torch.float64})
        and not torch.is_autocast_enabled(there[0].device.type)
        and not transforms_are_active()
    )
