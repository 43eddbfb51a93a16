"""Who is being traced; a function → the same, which a compiler calls as it is, between what it traces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

__all__ = ["in_trace", "is_traced", "tracing", "uncompiled"]

P = ParamSpec("P")
R = TypeVar("R")
in_trace: ContextVar[bool] = ContextVar("in_trace", default=False)
"""Whether this package traces what runs."""


def is_traced() -> bool:
    """Whether what runs is being traced, by torch's compiler or by this package: a tensor has no values there."""
    return torch.compiler.is_compiling() or in_trace.get()


@contextmanager
def tracing() -> Iterator[None]:
    """A context for what this package traces."""
    token = in_trace.set(True)
    try:
        yield
    finally:
        in_trace.reset(token)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """As ``torch.compiler.disable``, which would import the compiler also where nothing is compiled."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        result: R = torch.compiler.disable(function)(*args, **kwargs)
        return result

    return call
