"""A hyper-parameter as the user gave it → the same, or an error that names it.

A hyper-parameter is a number or a tensor of one element. A tensor's value is not looked at: that would stop
``vmap`` and ``torch.compile``, synchronize a GPU, and break off a meta-training whose learned rate dips below
zero.
"""

from __future__ import annotations

import numbers
from typing import Any, TypeAlias

from torch import Tensor

__all__ = [
    "HyperParameter",
    "check_at_least_zero",
    "check_decay",
    "check_decays",
    "check_learning_rate",
    "is_number",
    "is_zero",
]

HyperParameter: TypeAlias = float | Tensor
"""A number, or a tensor of one element (which may require grad and then gets its exact gradient)."""


def check_at_least_zero(name: str, value: Any) -> None:
    """Demand a number that is at least 0, or a tensor of one element.

    Raises:
        TypeError: it is neither a number nor a tensor, or a complex one.
        ValueError: it is negative, not a number (nan), or a tensor of another size.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"`{name}` as a tensor must have one element, got shape {tuple(value.shape)}")
        if value.is_complex():
            raise TypeError(f"`{name}` must be real, got a tensor of {value.dtype}")
    elif isinstance(value, numbers.Real):
        if not float(value) >= 0:
            raise ValueError(f"`{name}` must be at least 0, got {value}")
    else:
        raise TypeError(f"`{name}` must be a number or a tensor of one element, got {type(value).__name__}")


def check_decay(name: str, value: Any) -> None:
    """As :func:`check_at_least_zero`, and a number must be below 1: a running average has to forget."""
    check_at_least_zero(name, value)
    if not isinstance(value, Tensor) and not float(value) < 1:
        raise ValueError(f"`{name}` must be at least 0 and below 1, got {value}")


def check_decays(name: str, values: Any, count: int) -> None:
    """Demand a tuple or a list of so many decays, each as :func:`check_decay`."""
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise TypeError(f"`{name}` must be a tuple of {count} decays, got {values!r:.80}")
    for place, value in enumerate(values):
        check_decay(f"{name}[{place}]", value)


def check_learning_rate(name: str, value: Any) -> None:
    """As :func:`check_at_least_zero`, but a schedule will do too."""
    if isinstance(value, (Tensor, numbers.Real)):
        check_at_least_zero(name, value)
    elif not callable(value):
        raise TypeError(f"`{name}` must be a number, a tensor or a schedule, got {type(value).__name__}")


def is_number(*values: Any) -> bool:
    """Whether all of them are numbers, neither tensors nor schedules."""
    return all(isinstance(value, numbers.Real) for value in values)


def is_zero(value: HyperParameter) -> bool:
    """Whether it is the number 0, so that its term can be left out; a tensor never is."""
    return not isinstance(value, Tensor) and value == 0
