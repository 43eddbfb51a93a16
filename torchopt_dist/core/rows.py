"""A node's backward → the same for many gradients at a time, as ``is_grads_batched=True`` asks for.

There each gradient has one more dimension, which operations of torch go over by themselves. What computes values, draws
random numbers or looks at numbers does not: values that a backward computes again are those of all gradients, so they
are computed outside of that; and where a backward needs to see a number, it runs once for each gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.torch_private import (
    batched_gradient,
    is_batched_gradient,
    outside_of_batched_gradients,
    rows_of_gradient,
)

__all__ = ["in_rows"]

Backward = TypeVar("Backward", bound=Callable[..., Any])
_REFUSALS = ("vmap", "Batching rule")
"""Of what torch's errors say one, where an operation cannot go over many gradients."""


def in_rows(backward: Backward) -> Backward:
    """Make a ``backward`` that takes many gradients at a time: all together, or one by one where torch cannot."""

    @functools.wraps(backward)
    def of_any(ctx: Any, *bars: OptionalTensor) -> Any:
        if not any(bar is not None and is_batched_gradient(bar) for bar in bars):
            return backward(ctx, *bars)
        with outside_of_batched_gradients() as level:
            try:
                return backward(ctx, *bars)
            except RuntimeError as error:
                if level is None or not any(word in str(error) for word in _REFUSALS):
                    raise
            rows: list[Any] = [
                rows_of_gradient(bar, level) if bar is not None and is_batched_gradient(bar) else None
                for bar in bars
            ]
            count = next(len(own) for own in rows if own is not None)
            found = [
                backward(ctx, *[bar if own is None else own[n] for bar, own in zip(bars, rows, strict=True)])
                for n in range(count)
            ]
            return tuple(_together(own, level) for own in zip(*found, strict=True))

    return cast("Backward", of_any)


def _together(rows: Sequence[OptionalTensor], level: int) -> OptionalTensor:
    there = [row for row in rows if row is not None]
    if not there:
        return None
    filled: list[Tensor] = [torch.zeros_like(there[0]) if row is None else row for row in rows]
    return batched_gradient(torch.stack(filled), level)
