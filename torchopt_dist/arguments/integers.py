"""An argument → a whole number, or an error that names it."""

from __future__ import annotations

from numbers import Integral
from typing import Any

__all__ = ["integer"]


def integer(name: str, value: Any, least: int | None = None) -> int:
    """The value as a plain integer.

    Raises:
        TypeError: it is no integer; a truth value is none.
        ValueError: it is below the least.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an integer, got {type(value).__name__} {value!r:.80}")
    if least is not None and value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
    return int(value)
