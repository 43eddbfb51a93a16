"""Schedules, one after another → one schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchopt_dist.core.types import Numeric, Schedule
from torchopt_dist.schedule._numeric import clamp
from torchopt_dist.schedule._validation import check_steps

__all__ = ["join_schedules"]


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Run schedules one after another; each counts its steps from 0.

    Args:
        schedules: one or more schedules.
        boundaries: the steps at which the second and the later ones begin: at least 0, each above the one
            before.

    Returns:
        The schedule: a step count, or a tensor of them, → the value. For a tensor it calls all of
        ``schedules``, each with counts within its part.

    Raises:
        TypeError: a schedule is not callable, or a boundary is not a number.
        ValueError: there is no schedule, the boundaries are not one fewer, or they do not increase.

    Example:
        >>> from torchopt_dist.schedule.polynomial import linear_schedule
        >>> down, up = linear_schedule(1.0, 0.0, 2), linear_schedule(0.0, 8.0, 4)
        >>> schedule = join_schedules([down, up], [2])
        >>> [schedule(count) for count in range(5)]
        [1.0, 0.5, 0.0, 2.0, 4.0]
    """
    schedules, boundaries = tuple(schedules), tuple(boundaries)
    if not schedules:
        raise ValueError("`schedules` must hold at least one schedule, got none")
    for place, schedule in enumerate(schedules):
        if not callable(schedule):
            raise TypeError(f"`schedules[{place}]` must be callable, got {type(schedule).__name__}")
    if len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"`boundaries` must be one fewer than `schedules`, got {len(boundaries)} and {len(schedules)}"
        )
    for place, boundary in enumerate(boundaries):
        check_steps(f"boundaries[{place}]", boundary, at_least=0)
        if place and not boundary > boundaries[place - 1]:
            raise ValueError(f"`boundaries` must rise, got {list(boundaries)}")
    return partial(_join, schedules, boundaries)


def _join(schedules: tuple[Schedule, ...], boundaries: tuple[float, ...], count: Numeric) -> Numeric:
    starts = (0, *boundaries)
    if not isinstance(count, Tensor):
        place = bisect_right(boundaries, count)
        return schedules[place](count - starts[place])
    joined = _value(schedules[0], count, None, boundaries[0] if boundaries else None)
    for place, start in enumerate(boundaries, 1):
        length = boundaries[place] - start if place < len(boundaries) else None
        joined = torch.where(count < start, joined, _value(schedules[place], count - start, 0, length))
    return joined


def _value(schedule: Schedule, count: Tensor, low: float | None, high: float | None) -> Tensor:
    """The values of a schedule at the counts of its part; for other counts, its value at the boundary.

    It is not called with those, where it might be infinite and make the whole gradient NaN.
    """
    within = clamp(count, low, high)
    value = schedule(within)
    if isinstance(value, Tensor):
        return value
    dtype = count.dtype if count.is_floating_point() else torch.get_default_dtype()
    return torch.full_like(count, value, dtype=dtype)
