"""A node's backward → the same for many gradients at a time, as ``is_grads_batched=True`` asks for.

There each gradient has one more dimension, which operations of torch go over by themselves. What computes values, draws
random numbers or looks at numbers does not: values that a backward computes again are those of all gradients, so they
are computed outside of that; and where a backward needs to see a number, it runs once for each gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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

__all__ = ["goes_one_by_one", "in_rows", "of_rows", "rows_of"]

Backward = TypeVar("Backward", bound=Callable[..., Any])
_REFUSALS = ("vmap", "Batching rule")
"""Of what torch's errors say one, where an operation cannot go over many gradients."""


_level: ContextVar[int | None] = ContextVar("level", default=0)


def goes_one_by_one() -> bool:
    """Whether a backward is called for one of many gradients, or nothing is known of the many."""
    return _level.get() is None


def rows_of(tensor: Tensor) -> tuple[Tensor, bool]:
    """The gradients that a tensor stands for, along dimension 0, and whether it stands for many; else itself."""
    level = _level.get()
    if level and is_batched_gradient(tensor):
        return rows_of_gradient(tensor, level), True
    return tensor, False


def of_rows(rows: Tensor, batched: bool) -> Tensor:
    """The reverse of :func:`rows_of`, for what was batched there."""
    level = _level.get()
    return batched_gradient(rows, level) if level and batched else rows


@contextmanager
def _at_level(level: int | None) -> Iterator[None]:
    before = _level.set(level)
    try:
        yield
    finally:
        _level.reset(before)


def in_rows(backward: Backward) -> Backward:
    """Make a ``backward`` that takes many gradients at a time: all together, or one by one where torch cannot."""

    @functools.wraps(backward)
    def of_any(ctx: Any, *bars: OptionalTensor) -> Any:
        if not any(bar is not None and is_batched_gradient(bar) for bar in bars):
            return backward(ctx, *bars)
        with outside_of_batched_gradients() as level, _at_level(level):
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
            with _at_level(None):
                found = [
                    backward(
                        ctx, *[bar if own is None else own[n] for bar, own in zip(bars, rows, strict=True)]
                    )
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
