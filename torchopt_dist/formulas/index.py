"""A tensor, an index of it with parts that have no value yet → a tensor and an index that need none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["selected"]


def selected(tensor: Tensor, index: Any) -> tuple[Tensor, Any]:
    """A tensor and an index of it → those in which index 0 stands where a tensor of one index, or a number, was.

    Torch makes a number of such a tensor, and a trace a program for each value.
    """
    given = tuple(map(_with_numbers, index if type(index) is tuple else (index,)))
    if not any(map(_is_index, given)) or not all(
        _is_index(one) or one is None or one is ... or isinstance(one, (int, slice)) for one in given
    ):
        return tensor, given if type(index) is tuple else given[0]
    taken = sum(not (one is None or one is ...) for one in given)
    if any(isinstance(one, bool) for one in given) or taken > tensor.ndim:
        return tensor, given if type(index) is tuple else given[0]
    dim, made = 0, []
    for one in given:
        if _is_index(one):
            place = one if isinstance(one, Tensor) else torch.full((), one, device=tensor.device)
            place = torch.where(place < 0, place + tensor.shape[dim], place)
            tensor = tensor.index_select(dim, place.reshape(1))
        made.append(0 if _is_index(one) else one)
        dim += tensor.ndim - taken if one is ... else one is not None
    return tensor, tuple(made)


def _with_numbers(part: Any) -> Any:
    """A slice from one tensor to another as one of numbers, which torch takes unknown ones of."""
    if type(part) is not slice:
        return part
    ends = (part.start, part.stop, part.step)
    return slice(*[one.item() if isinstance(one, Tensor) else one for one in ends])


def _is_index(index: Any) -> bool:
    if isinstance(index, torch.SymInt):
        return True
    return (
        isinstance(index, Tensor)
        and index.ndim == 0
        and index.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    )
