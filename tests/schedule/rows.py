"""The schedules, a row each, with a closed form in plain Python to compare them with."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.rows import each_row
from torchopt_dist.schedule import (
    cosine_decay,
    exponential_decay,
    join_schedules,
    linear_schedule,
    one_cycle,
    piecewise_constant_schedule,
    polynomial_schedule,
    warmup_cosine,
)


class Row(NamedTuple):
    make: Callable[..., Callable]
    """Takes the values, by name, and has its numbers of steps already."""
    values: dict[str, float]
    """Those that may be tensors that require grad."""
    closed: Callable[[float], float]
    """Count → value."""
    counts: tuple[float, ...]
    """The borders and their neighbours, and some between."""


def joined(init_value, end_value, decay_rate):
    first = linear_schedule(init_value, end_value, transition_steps=3)
    return join_schedules([first, exponential_decay(end_value, decay_rate), lambda count: 0.25], [4, 7])


def stairs(init_value, first, second):
    return piecewise_constant_schedule(init_value, {2: first, 5: second})


def half_cosine(start, end, t, steps):
    return end + (start - end) * (1 + math.cos(math.pi * min(t, steps) / steps)) / 2


ROWS = {
    "polynomial": Row(
        partial(polynomial_schedule, transition_steps=5, transition_begin=2),
        {"init_value": 0.7, "end_value": 0.1, "power": 2.5},
        lambda t: 0.1 + 0.6 * (1 - min(max(t - 2, 0), 5) / 5) ** 2.5,
        (0, 1, 2, 2.5, 3, 6, 7, 8, 1000),
    ),
    "polynomial, a root": Row(
        partial(polynomial_schedule, transition_steps=5),
        {"init_value": 0.1, "end_value": 0.7, "power": 0.5},
        lambda t: 0.7 - 0.6 * math.sqrt(1 - min(t, 5) / 5),
        (0, 1, 4, 4.9, 5, 6),
    ),
    "polynomial, no steps": Row(
        partial(polynomial_schedule, transition_steps=0),
        {"init_value": 0.7, "end_value": 0.1, "power": 2.0},
        lambda t: 0.7,
        (0, 1, 9),
    ),
    "linear": Row(
        partial(linear_schedule, transition_steps=4, transition_begin=3),
        {"init_value": 0.7, "end_value": 0.1},
        lambda t: 0.7 - 0.15 * min(max(t - 3, 0), 4),
        (0, 2, 3, 4, 6, 7, 8),
    ),
    "exponential": Row(
        partial(exponential_decay, transition_steps=3, transition_begin=2),
        {"init_value": 0.7, "decay_rate": 0.4},
        lambda t: 0.7 * math.exp(math.log(0.4) * max(t - 2, 0) / 3),
        (0, 1, 2, 3, 4.5, 5, 30),
    ),
    "exponential, in stairs": Row(
        partial(exponential_decay, transition_steps=3, transition_begin=2, staircase=True),
        {"init_value": 0.7, "decay_rate": 0.4},
        lambda t: 0.7 * math.prod([0.4] * (max(int(t) - 2, 0) // 3)),
        (0, 1, 2, 4, 4.5, 5, 7, 8, 10, 11),
    ),
    "exponential, down to an end": Row(
        exponential_decay,
        {"init_value": 0.7, "decay_rate": 0.5, "end_value": 0.1},
        lambda t: max(0.7 * 0.5**t, 0.1),
        (0, 1, 2, 3, 4, 5000),
    ),
    "exponential, up to an end": Row(
        exponential_decay,
        {"init_value": 0.7, "decay_rate": 2.0, "end_value": 5.0},
        lambda t: min(0.7 * 2**t, 5.0) if t < 100 else 5.0,
        (0, 1, 2, 3, 4, 5000),
    ),
    "cosine": Row(
        partial(cosine_decay, decay_steps=8),
        {"init_value": 0.7, "alpha": 0.2, "exponent": 1.5},
        lambda t: 0.7 * (0.2 + 0.8 * math.cos(math.pi * min(t, 8) / 16) ** 3),
        (0, 1, 4, 7, 7.9, 8, 9, 1000),
    ),
    "warmup, cosine": Row(
        partial(warmup_cosine, warmup_steps=3, decay_steps=11),
        {"init_value": 0.1, "peak_value": 0.7, "end_value": 0.2, "exponent": 1.0},
        lambda t: 0.1 + 0.2 * t if t < 3 else 0.2 + 0.5 * math.cos(math.pi * (min(t, 11) - 3) / 16) ** 2,
        (0, 1, 2, 2.5, 3, 4, 10, 11, 12, 1000),
    ),
    "warmup, cosine, no rise": Row(
        partial(warmup_cosine, warmup_steps=0, decay_steps=8),
        {"init_value": 0.1, "peak_value": 0.7},
        lambda t: 0.7 * math.cos(math.pi * min(t, 8) / 16) ** 2,
        (0, 1, 7, 8),
    ),
    "piecewise constant": Row(
        stairs,
        {"init_value": 0.7, "first": 0.5, "second": 3.0},
        lambda t: 0.7 * (0.5 if t >= 2 else 1) * (3.0 if t >= 5 else 1),
        (0, 1, 1.9, 2, 3, 4.5, 5, 6, 5000),
    ),
    "one cycle": Row(
        partial(one_cycle, transition_steps=10, div_factor=5.0, final_div_factor=20.0),
        {"peak_value": 0.7},
        lambda t: half_cosine(0.14, 0.7, t, 3) if t < 3 else half_cosine(0.7, 0.007, t - 3, 7),
        (0, 1, 2.5, 3, 4, 9, 10, 11, 1000),
    ),
    "one cycle, of lines": Row(
        partial(one_cycle, transition_steps=10, pct_start=0.45, anneal_strategy="linear"),
        {"peak_value": 0.7},
        lambda t: 0.028 + 0.168 * t if t < 4 else 0.7 - (0.7 - 0.028e-4) * min(t - 4, 6) / 6,
        (0, 1, 3, 4, 5, 9.5, 10, 11),
    ),
    "one cycle, no rise": Row(
        partial(one_cycle, transition_steps=4, pct_start=0.0),
        {"peak_value": 0.7},
        lambda t: half_cosine(0.7, 0.028e-4, t, 4),
        (0, 1, 3, 4, 5),
    ),
    "joined": Row(
        joined,
        {"init_value": 0.7, "end_value": 0.1, "decay_rate": 3.0},
        lambda t: 0.7 - 0.2 * min(t, 3) if t < 4 else 0.1 * 3.0 ** (t - 4) if t < 7 else 0.25,
        (0, 2, 3, 3.5, 4, 5, 6, 7, 8, 5000),
    ),
}

every_row = each_row("row", ROWS.values(), ids=ROWS)
