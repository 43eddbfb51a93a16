"""Step count → value that goes from one number to another: along a polynomial, half a cosine, by a factor or in steps.

The cosine is that of Loshchilov and Hutter 2017, SGDR: Stochastic Gradient Descent with Warm Restarts, eq. 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from torchopt_dist.core.types import Numeric, Schedule
from torchopt_dist.schedule._numeric import (
    between,
    check_steps,
    check_value,
    clamp,
    cosine,
    fall,
    floor,
    power,
    progress,
    scalar,
    where,
)

__all__ = [
    "cosine_decay",
    "exponential_decay",
    "linear_schedule",
    "piecewise_constant_schedule",
    "polynomial_schedule",
]


def polynomial_schedule(
    init_value: Numeric,
    end_value: Numeric,
    power: Numeric,
    transition_steps: int,
    transition_begin: int = 0,
) -> Schedule:
    """From ``init_value`` to ``end_value`` along a polynomial.

    ``end_value + (init_value - end_value) * (1 - s) ** power``, where ``s`` is the fraction of the transition that is
    done.

    Args:
        init_value: the value up to step ``transition_begin``; a number or a tensor of one element.
        end_value: the value from step ``transition_begin + transition_steps`` on; a number or a tensor of one element.
        power: the exponent of the polynomial, at least 0 (0: no transition); a number or a tensor of one element.
        transition_steps: how long the transition takes; if not above 0 there is none, and the value is always
            ``init_value``.
        transition_begin: the step at which the transition begins, at least 0.

    Returns:
        The schedule: a step count, or a tensor of them, → the value.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> schedule = polynomial_schedule(1.0, 0.0, power=2, transition_steps=4)
        >>> [schedule(count) for count in range(6)]
        [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    check_value("init_value", init_value)
    check_value("end_value", end_value)
    check_value("power", power, at_least=0)
    check_steps("transition_steps", transition_steps)
    check_steps("transition_begin", transition_begin, at_least=0)
    return partial(_polynomial, init_value, end_value, power, max(transition_steps, 0), transition_begin)


def linear_schedule(
    init_value: Numeric, end_value: Numeric, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """From ``init_value`` to ``end_value`` along a line: :func:`polynomial_schedule` with a power of 1.

    Args:
        init_value: the value up to step ``transition_begin``; a number or a tensor of one element.
        end_value: the value from step ``transition_begin + transition_steps`` on; a number or a tensor of one element.
        transition_steps: how long the transition takes; if not above 0 there is none, and the value is always
            ``init_value``.
        transition_begin: the step at which the transition begins, at least 0.

    Returns:
        The schedule: a step count, or a tensor of them, → the value.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> schedule = linear_schedule(1.0, 0.0, transition_steps=4, transition_begin=1)
        >>> [schedule(count) for count in range(6)]
        [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return polynomial_schedule(init_value, end_value, 1.0, transition_steps, transition_begin)


def _polynomial(
    init_value: Numeric, end_value: Numeric, power: Numeric, steps: float, begin: float, count: Numeric
) -> Numeric:
    left = 1 - progress(count, begin, steps)
    return between(scalar(init_value), scalar(end_value), fall(left, scalar(power)))


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


def _decay(init_value: Numeric, steps: float, alpha: Numeric, exponent: Numeric, count: Numeric) -> Numeric:
    return _cosine(init_value, scalar(alpha) * scalar(init_value), steps, exponent, count)


def _cosine(start: Numeric, end: Numeric, steps: float, exponent: Numeric, count: Numeric) -> Numeric:
    left = (1 + cosine(math.pi * progress(count, 0, steps))) / 2
    return between(scalar(start), scalar(end), fall(left, scalar(exponent)))


def exponential_decay(
    init_value: Numeric,
    decay_rate: Numeric,
    transition_begin: int = 0,
    transition_steps: int = 1,
    staircase: bool = False,
    end_value: Numeric | None = None,
) -> Schedule:
    """A value that starts at ``init_value`` and is multiplied by ``decay_rate`` every ``transition_steps`` steps.

    ``init_value * decay_rate ** ((count - transition_begin) / transition_steps)``.

    Args:
        init_value: the value up to step ``transition_begin``; a number or a tensor of one element.
        decay_rate: the factor, above 0; a number or a tensor of one element. Above 1 the value grows.
        transition_begin: the step at which the transition begins, at least 0.
        transition_steps: the number of steps in which the value is multiplied by ``decay_rate`` once; above 0.
        staircase: use only whole powers of ``decay_rate``, so that the value changes every ``transition_steps`` steps
            instead of at each step.
        end_value: the lower limit of the values or, for a ``decay_rate`` of 1 or above, their upper limit, also for
            ``init_value``; a number or a tensor of one element. No limit, if not given.

    Returns:
        The schedule: a step count, or a tensor of them, → the value.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> schedule = exponential_decay(1.0, 0.5, transition_begin=1, end_value=0.2)
        >>> [schedule(count) for count in range(5)]
        [1.0, 1.0, 0.5, 0.25, 0.2]
    """
    check_value("init_value", init_value)
    check_value("decay_rate", decay_rate, above=0)
    check_steps("transition_begin", transition_begin, at_least=0)
    check_steps("transition_steps", transition_steps, above=0)
    if end_value is not None:
        check_value("end_value", end_value)
    return partial(
        _exponential, init_value, decay_rate, transition_begin, transition_steps, bool(staircase), end_value
    )


def _exponential(
    init_value: Numeric,
    decay_rate: Numeric,
    begin: float,
    steps: float,
    staircase: bool,
    end_value: Numeric | None,
    count: Numeric,
) -> Numeric:
    init_value, decay_rate = scalar(init_value), scalar(decay_rate)
    turns = clamp(count - begin, 0, None) / steps
    if staircase:
        turns = floor(turns)
    value = init_value * power(decay_rate, turns)
    return value if end_value is None else _cut(value, init_value, decay_rate, turns, scalar(end_value))


def _cut(
    value: Numeric, init_value: Numeric, decay_rate: Numeric, turns: Numeric, end_value: Numeric
) -> Numeric:
    over = value - end_value
    beyond = where(decay_rate < 1, over < 0, over > 0)
    if not isinstance(over, Tensor):
        return float(end_value) if beyond else value
    # Beyond the end the power may be infinite, and so its derivative: it is taken anew, of 0 turns there.
    turns = turns * torch.logical_not(beyond).to(over.dtype)
    return torch.where(beyond, end_value, init_value * power(decay_rate, turns))


def piecewise_constant_schedule(
    init_value: Numeric, boundaries_and_scales: Mapping[int, Numeric] | None = None
) -> Schedule:
    """Constant, and from each boundary on multiplied by its factor, as ``torch.optim.lr_scheduler.MultiStepLR``.

    Args:
        init_value: the value at step 0; a number or a tensor of one element.
        boundaries_and_scales: step → factor by which the value is multiplied from this step on; a number that is at
            least 0, or a tensor of one element. Without any the value is ``init_value`` at every step.

    Returns:
        The schedule: a step count, or a tensor of them, → the value.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> schedule = piecewise_constant_schedule(1.0, {2: 0.5, 4: 0.5})
        >>> [schedule(count) for count in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    check_value("init_value", init_value)
    if not isinstance(boundaries_and_scales, (Mapping, type(None))):
        raise TypeError(
            "`boundaries_and_scales` must map steps to factors, got "
            f"{type(boundaries_and_scales).__name__} {boundaries_and_scales!r:.80}"
        )
    pairs = tuple((boundaries_and_scales or {}).items())
    for boundary, factor in pairs:
        check_steps("boundaries_and_scales", boundary, at_least=0)
        check_value(f"boundaries_and_scales[{boundary}]", factor, at_least=0)
    return partial(_constant, init_value, pairs)


def _constant(init_value: Numeric, pairs: tuple[tuple[float, Numeric], ...], count: Numeric) -> Numeric:
    value = scalar(init_value)
    if isinstance(count, Tensor) and not isinstance(value, Tensor):
        dtype = count.dtype if count.is_floating_point() else None
        value = count.new_full(count.shape, value, dtype=dtype or _default())
    for boundary, factor in pairs:
        value = where(count >= boundary, value * scalar(factor), value)
    return value


def _default() -> torch.dtype:
    return torch.get_default_dtype()
