"""Tensors that an operation is given → whether a formula takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchopt_dist._torch_private import transforms_are_active

__all__ = ["need_formula"]


def need_formula(input: Tensor) -> bool:
    """Whether a transform is active, and the formula has torch's precision."""
    return transforms_are_active() and input.dtype in (torch.float32, torch.float64)
