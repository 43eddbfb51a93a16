"""Step count → value that rises to a peak and then falls below where it began, along halves of cosines or lines."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torchopt_dist.core.types import Numeric, Schedule
from torchopt_dist.schedule._numeric import scalar
from torchopt_dist.schedule._validation import check_steps, check_value
from torchopt_dist.schedule.cosine import _cosine
from torchopt_dist.schedule.join import join_schedules
from torchopt_dist.schedule.polynomial import linear_schedule

__all__ = ["one_cycle"]


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
