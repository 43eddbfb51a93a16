"""Schedules, one after another → one schedule; those that first rise and then fall are made so."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from torchopt_dist.core.types import Numeric, Schedule
from torchopt_dist.schedule._numeric import check_steps, check_value, clamp, scalar
from torchopt_dist.schedule.transitions import _cosine, linear_schedule

__all__ = ["join_schedules", "one_cycle", "warmup_cosine"]


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
        >>> from torchopt_dist.schedule.transitions import linear_schedule
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


def warmup_cosine(
    init_value: Numeric,
    peak_value: Numeric,
    warmup_steps: int,
    decay_steps: int,
    end_value: Numeric = 0.0,
    exponent: Numeric = 1.0,
) -> Schedule:
    """From ``init_value`` up to ``peak_value`` along a line, and on to ``end_value`` along half a cosine.

    Args:
        init_value: the value at step 0; a number or a tensor of one element.
        peak_value: the value at step ``warmup_steps``; a number or a tensor of one element.
        warmup_steps: the number of steps that the rise takes, at least 0.
        decay_steps: the number of steps of rise and decay together; above ``warmup_steps``.
        end_value: the value from step ``decay_steps`` on; a number or a tensor of one element.
        exponent: the exponent of the cosine curve (see :func:`cosine_decay`), at least 0; a number or a tensor of one
            element.

    Returns:
        The schedule: a step count, or a tensor of them, → the value.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> schedule = warmup_cosine(0.0, 1.0, warmup_steps=2, decay_steps=6)
        >>> [round(schedule(count), 4) for count in range(8)]
        [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """
    check_value("init_value", init_value)
    check_value("peak_value", peak_value)
    check_steps("warmup_steps", warmup_steps, at_least=0)
    check_steps("decay_steps", decay_steps)
    if not decay_steps > warmup_steps:
        raise ValueError(
            f"`decay_steps` must be above `warmup_steps`, which it includes, got {decay_steps} and {warmup_steps}"
        )
    check_value("end_value", end_value)
    check_value("exponent", exponent, at_least=0)
    rise = linear_schedule(init_value, peak_value, warmup_steps)
    return join_schedules(
        [rise, partial(_cosine, peak_value, end_value, decay_steps - warmup_steps, exponent)], [warmup_steps]
    )


def one_cycle(
    peak_value: Numeric,
    transition_steps: int,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    anneal_strategy: Literal["cos", "linear"] = "cos",
) -> Schedule:
    """From ``peak_value / div_factor`` up to ``peak_value``, and down to the first value over ``final_div_factor``.

    [Smith and Topin 2019, Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates.] The
    names are those of ``torch.optim.lr_scheduler.OneCycleLR``. There the last value is that of step
    ``transition_steps - 1``; here it is that of step ``transition_steps``, as in optax.

    Args:
        peak_value: the largest value; a number or a tensor of one element.
        transition_steps: the number of steps of rise and fall together, above 0.
        pct_start: the fraction of the steps that the rise takes, in [0, 1); it is rounded down to a whole step.
        div_factor: what ``peak_value`` is divided by for the first value, above 0.
        final_div_factor: what the first value is divided by for the last one, above 0.
        anneal_strategy: the form of rise and fall: ``"cos"``, half a cosine each, or ``"linear"``.

    Returns:
        The schedule: a step count, or a tensor of them, → the value; after the fall it is the last one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, a tensor has more than one element, or there is no such form.

    Example:
        >>> schedule = one_cycle(1.0, transition_steps=6, pct_start=0.34, div_factor=4.0, final_div_factor=1.0)
        >>> [round(schedule(count), 4) for count in range(8)]
        [0.25, 0.625, 1.0, 0.8902, 0.625, 0.3598, 0.25, 0.25]
    """
    check_value("peak_value", peak_value)
    check_steps("transition_steps", transition_steps, above=0)
    check_steps("pct_start", pct_start, at_least=0)
    if not pct_start < 1:
        raise ValueError(f"`pct_start` must be below 1, got {pct_start}")
    check_steps("div_factor", div_factor, above=0)
    check_steps("final_div_factor", final_div_factor, above=0)
    if anneal_strategy not in ("cos", "linear"):
        raise ValueError(f"`anneal_strategy` must be 'cos' or 'linear', got {anneal_strategy!r}")
    rise = int(pct_start * transition_steps)
    first, last = 1 / div_factor, 1 / (div_factor * final_div_factor)
    make = _half_cosine if anneal_strategy == "cos" else linear_schedule
    parts = join_schedules([make(first, 1.0, rise), make(1.0, last, transition_steps - rise)], [rise])
    return partial(_of_peak, peak_value, parts)


def _of_peak(peak_value: Numeric, parts: Schedule, count: Numeric) -> Numeric:
    return scalar(peak_value) * parts(count)


def _half_cosine(start: Numeric, end: Numeric, steps: int) -> Schedule:
    return partial(_cosine, start, end, steps, 1.0)
