"""Step count → value that goes from one number to another along a polynomial, or a line."""

from __future__ import annotations

from functools import partial

from torchopt_dist.core.types import Numeric, Schedule
from torchopt_dist.schedule._numeric import between, fall, progress, scalar
from torchopt_dist.schedule._validation import check_steps, check_value

__all__ = ["linear_schedule", "polynomial_schedule"]


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
