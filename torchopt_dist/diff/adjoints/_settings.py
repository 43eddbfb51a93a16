"""A setting of an adjoint as the user gave it → the same, or an error that names it."""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["check_above_zero"]


def check_above_zero(name: str, value: Any) -> None:
    """Check that a setting is a finite number above 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of its range.
    """
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}")
    if not (float(value) > 0 and math.isfinite(value)):
        raise ValueError(f"`{name}` must be finite and above 0, got {value}")
