"""Step count → value that falls along half a cosine, at once or after a linear rise.

The curve is that of Loshchilov and Hutter 2017, SGDR: Stochastic Gradient Descent with Warm Restarts, eq. 5.
"""

from __future__ import annotations

import math
from functools import partial

from torchopt_dist.core.types import Numeric, Schedule
from torchopt_dist.schedule._numeric import between, cosine, fall, progress, scalar
from torchopt_dist.schedule._validation import check_steps, check_value
from torchopt_dist.schedule.join import join_schedules
from torchopt_dist.schedule.polynomial import linear_schedule

__all__ = ["cosine_decay", "warmup_cosine"]


def cosine_decay(
    init_value: Numeric, decay_steps: int, alpha: Numeric = 0.0, exponent: Numeric = 1.0
) -> Schedule:
    """From ``init_value`` to ``alpha * init_value`` along half a cosine.

    ``init_value * (alpha + (1 - alpha) * ((1 + cos(pi * s)) / 2) ** exponent)``, where ``s`` is the fraction of the
    steps that is done.

    Args:
        init_value: the value at step 0; a number or a tensor of one element.
        decay_steps: the number of steps that the decay takes, above 0.
        alpha: the fraction of ``init_value`` that remains after the decay; a number or a tensor of one element.
        exponent: the exponent of the curve, at least 0; a number or a tensor of one element.

    Returns:
        The schedule: a step count, or a tensor of them, → the value.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> schedule = cosine_decay(1.0, decay_steps=4, alpha=0.5)
        >>> [round(schedule(count), 4) for count in range(6)]
        [1.0, 0.9268, 0.75, 0.5732, 0.5, 0.5]
    """
    check_value("init_value", init_value)
    check_steps("decay_steps", decay_steps, above=0)
    check_value("alpha", alpha)
    check_value("exponent", exponent, at_least=0)
    return partial(_decay, init_value, decay_steps, alpha, exponent)


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


def _decay(init_value: Numeric, steps: float, alpha: Numeric, exponent: Numeric, count: Numeric) -> Numeric:
    return _cosine(init_value, scalar(alpha) * scalar(init_value), steps, exponent, count)


def _cosine(start: Numeric, end: Numeric, steps: float, exponent: Numeric, count: Numeric) -> Numeric:
    left = (1 + cosine(math.pi * progress(count, 0, steps))) / 2
    return between(scalar(start), scalar(end), fall(left, scalar(exponent)))
