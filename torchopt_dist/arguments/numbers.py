"""An argument → a whole number, or the seconds of a time-out, or an error that names it."""

from __future__ import annotations

from numbers import Integral
from typing import Any

__all__ = ["UNSET_TIMEOUT", "integer", "seconds_of"]


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


_SHORTEST, _LONGEST = 1e-3, 1e6
"""Seconds. Torch counts a time-out in milliseconds of 32 bits, and takes less than one of them for no limit."""
UNSET_TIMEOUT = -1.0
"""As in ``torch.distributed.rpc``: the RPC group's time-out, which is none unless its options ask for one."""


def seconds_of(timeout: float | None, default: float = 0.0) -> float:
    """A time-out that the user gave, checked; ``None`` and 0 mean no limit, ``UNSET_TIMEOUT`` means ``default``."""
    if timeout is None:
        return 0.0
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"timeout must be a number of seconds or None, got {type(timeout).__name__} {timeout!r}"
        )
    if timeout == UNSET_TIMEOUT:
        return default
    if not timeout >= 0:
        raise ValueError(f"timeout must be at least 0 seconds, got {timeout}")
    if timeout > _LONGEST:
        return 0.0
    return max(float(timeout), _SHORTEST) if timeout else 0.0
