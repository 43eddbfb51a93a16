"""Numbers or tensors that a user gave a schedule → the same, or an error that names them, and their arithmetic.

All numbers give a number, one tensor among them gives a tensor. Nothing branches on the values of a tensor, and the
branch that a ``where`` discards has a finite derivative: 0 times infinity would make the gradient NaN.

An argument is a number or a tensor of one element, whose content is not looked at. Numbers of steps are numbers.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.core.types import Numeric

__all__ = [
    "between",
    "check_steps",
    "check_value",
    "clamp",
    "cosine",
    "fall",
    "floor",
    "power",
    "progress",
    "scalar",
    "where",
]


def scalar(value: Numeric) -> Numeric:
    """A tensor of one element as one of no dimensions; a number as it is."""
    return value.reshape(()) if isinstance(value, Tensor) else value


def clamp(value: Numeric, low: float | None, high: float | None) -> Numeric:
    """The value, or the limit that it exceeds."""
    if isinstance(value, Tensor):
        return value if low is None and high is None else value.clamp(low, high)
    if low is not None:
        value = max(value, low)
    return value if high is None else min(value, high)


def where(condition: Tensor | bool, chosen: Any, other: Any) -> Any:
    """``chosen`` where the condition holds, else ``other``; for a tensor condition one of them is a tensor."""
    if isinstance(condition, Tensor):
        return torch.where(condition, chosen, other)
    return chosen if condition else other


def floor(value: Numeric) -> Numeric:
    """The largest whole number that is not above the value."""
    return torch.floor(value) if isinstance(value, Tensor) else math.floor(value)


def cosine(angle: Numeric) -> Numeric:
    """The cosine of an angle in radians."""
    return torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)


def power(base: Numeric, exponent: Numeric) -> Numeric:
    """``base ** exponent`` of a base above 0; infinite, as torch has it, where it is too large."""
    try:
        return base**exponent
    except OverflowError:  # of numbers only
        return math.inf


def progress(count: Numeric, begin: float, steps: float) -> Numeric:
    """The fraction of a transition that is done: 0 up to ``begin``, 1 from ``begin + steps`` on; 0 without steps."""
    return clamp(count - begin, 0, steps) / (steps or 1)


def fall(left: Numeric, exponent: Numeric) -> Numeric:
    """``left ** exponent`` for ``left`` in [0, 1] and an exponent that is at least 0.

    Where ``left`` is 0, all derivatives are 0; for the exponent this is the limit. The exponent 1, as a number, costs
    nothing.
    """
    if not isinstance(exponent, Tensor) and exponent == 1:
        return left
    ended = left == 0
    shape = where(ended, 1.0, left) ** exponent
    at_zero = 0.0 ** (exponent.detach() if isinstance(exponent, Tensor) else exponent)
    return where(ended, shape * at_zero, shape)


def between(start: Numeric, end: Numeric, share: Numeric) -> Numeric:
    """``share * start + (1 - share) * end``: exactly ``start`` at 1 and ``end`` at 0."""
    return start * share + end * (1 - share)


def check_value(name: str, value: Any, *, at_least: float | None = None, above: float | None = None) -> None:
    """Demand a finite number, within its limits, or a tensor of one element.

    Raises:
        TypeError: it is neither a number nor a tensor.
        ValueError: it is nan, infinite or beyond its limits, or a tensor of another size.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"`{name}` as a tensor must have one element, got shape {tuple(value.shape)}")
    elif isinstance(value, numbers.Real):
        _check_range(name, value, at_least, above)
    else:
        raise TypeError(f"`{name}` must be a number or a tensor of one element, got {type(value).__name__}")


def check_steps(name: str, value: Any, *, at_least: float | None = None, above: float | None = None) -> None:
    """Demand a finite number within its limits.

    Raises:
        TypeError: it is not a number.
        ValueError: it is nan, infinite or beyond its limits.
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}")
    _check_range(name, value, at_least, above)


def _check_range(name: str, value: Any, at_least: float | None, above: float | None) -> None:
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}")
    if at_least is not None and value < at_least:
        raise ValueError(f"`{name}` must be at least {at_least:g}, got {value}")
    if above is not None and value <= above:
        raise ValueError(f"`{name}` must be above {above:g}, got {value}")
