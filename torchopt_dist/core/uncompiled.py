"""A function → the same, which a compiler calls as it is: what it traces ends before, and goes on after."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["uncompiled"]

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """As ``torch.compiler.disable``, which would import the compiler also where nothing is compiled."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        result: R = torch.compiler.disable(function)(*args, **kwargs)
        return result

    return call
