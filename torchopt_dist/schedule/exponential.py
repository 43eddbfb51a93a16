"""Step count → value that is multiplied by the same factor again and again."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torchopt_dist.core.types import Numeric, Schedule
from torchopt_dist.schedule._numeric import clamp, floor, power, scalar, where
from torchopt_dist.schedule._validation import check_steps, check_value

__all__ = ["exponential_decay"]


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
