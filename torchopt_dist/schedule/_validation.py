"""An argument of a schedule as the user gave it → the same, or an error that names it.

A value is a number or a tensor of one element, whose content is not looked at. Numbers of steps are numbers.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor

__all__ = ["check_steps", "check_value"]


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
