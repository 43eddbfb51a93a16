"""A state whose tensors are filled with one number, as first states are → the same in the memory of one element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist._torch_private import is_functorch_tensor
from torchopt_dist._types import OptState

__all__ = ["expanded", "filled"]

LEAST = 1 << 14
"""Bytes of a tensor that are worth a look at all its elements."""


def expanded(state: OptState) -> OptState:
    """The same numbers; a tensor without history whose elements are all the same is one element, repeated.

    Such a tensor must not be written to: :func:`filled` makes one that may be.
    """
    return pytree.map_tensors(_expanded, state)


def filled(state: OptState) -> OptState:
    """The same numbers, each tensor of :func:`expanded` in memory of its own."""
    return pytree.map_tensors(_filled, state)


def _expanded(tensor: Tensor) -> Tensor:
    if tensor.requires_grad or is_functorch_tensor(tensor) or tensor.is_complex() or not _is_large(tensor):
        return tensor
    least, most = torch.aminmax(tensor)
    return least.expand(tensor.shape) if bool(least == most) else tensor


def _is_large(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and tensor.is_contiguous()
    return dense and tensor.numel() * tensor.element_size() >= LEAST


def _filled(tensor: Tensor) -> Any:
    is_one = tensor.layout == torch.strided and tensor.numel() > 1 and not any(tensor.stride())
    return tensor.contiguous() if is_one else tensor
