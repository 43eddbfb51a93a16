"""Tensors → memory of their own, which the derivative of an update may overwrite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist._types import OptionalTensor
from torchopt_dist.ops._columns import put
from torchopt_dist.transform._pulled_step import Room

__all__ = ["add_to", "apart_from", "own", "room_like"]


def room_like(params: Sequence[Tensor], places: Sequence[int]) -> Room:
    """Memory for what the derivative of an update gives and needs, for the parameters at these places."""
    columns = [
        put([None] * len(params), places, [torch.empty_like(params[p]) for p in places]) for _ in range(2)
    ]
    return Room(*columns)


def own(tensor: OptionalTensor) -> OptionalTensor:
    """The same numbers in memory of their own."""
    return None if tensor is None else tensor.detach().clone(memory_format=torch.preserve_format)


def add_to(one: OptionalTensor, other: OptionalTensor) -> OptionalTensor:
    """The sum of tensors that may be missing, over the memory of the first, or in its own."""
    if one is None:
        return own(other)
    return one if other is None else one.add_(other)


def apart_from(room: Sequence[OptionalTensor], tensor: OptionalTensor) -> OptionalTensor:
    """The same numbers, in memory that is not that of others."""
    if tensor is None or tensor.layout != torch.strided:
        return tensor
    taken = {other.untyped_storage().data_ptr() for other in room if other is not None}
    return own(tensor) if tensor.untyped_storage().data_ptr() in taken else tensor
