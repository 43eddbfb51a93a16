from __future__ import annotations

import math

import pytest
import torch

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


def constant(count):
    return 0.5


BAD = [
    (
        polynomial_schedule,
        ("a", 0.0, 1, 4),
        TypeError,
        "`init_value` must be a number or a tensor .* got str",
    ),
    (polynomial_schedule, (math.nan, 0.0, 1, 4), ValueError, "`init_value` must be finite, got nan"),
    (polynomial_schedule, (torch.ones(2), 0.0, 1, 4), ValueError, r"`init_value` .* got shape \(2,\)"),
    (polynomial_schedule, (1.0, math.inf, 1, 4), ValueError, "`end_value` must be finite, got inf"),
    (polynomial_schedule, (1.0, 0.0, -0.5, 4), ValueError, "`power` must be at least 0, got -0.5"),
    (polynomial_schedule, (1.0, 0.0, 1, "4"), TypeError, "`transition_steps` must be a number, got str"),
    (polynomial_schedule, (1.0, 0.0, 1, 4, -1), ValueError, "`transition_begin` must be at least 0, got -1"),
    (linear_schedule, (None, 0.0, 4), TypeError, "`init_value` .* got NoneType"),
    (
        linear_schedule,
        (1.0, 0.0, torch.tensor(4)),
        TypeError,
        "`transition_steps` must be a number, got Tensor",
    ),
    (exponential_decay, (1.0, 0), ValueError, "`decay_rate` must be above 0, got 0"),
    (exponential_decay, (1.0, 0.5, -1), ValueError, "`transition_begin` must be at least 0, got -1"),
    (exponential_decay, (1.0, 0.5, 0, 0), ValueError, "`transition_steps` must be above 0, got 0"),
    (exponential_decay, (1.0, 0.5, 0, 1, False, "0"), TypeError, "`end_value` must be a number .* got str"),
    (cosine_decay, (1.0, 0), ValueError, "`decay_steps` must be above 0, got 0"),
    (cosine_decay, (1.0, 4, [0.1]), TypeError, "`alpha` must be a number .* got list"),
    (cosine_decay, (1.0, 4, 0.1, -1), ValueError, "`exponent` must be at least 0, got -1"),
    (warmup_cosine, (0.0, "1", 2, 4), TypeError, "`peak_value` must be a number .* got str"),
    (warmup_cosine, (0.0, 1.0, -1, 4), ValueError, "`warmup_steps` must be at least 0, got -1"),
    (
        warmup_cosine,
        (0.0, 1.0, 4, 4),
        ValueError,
        "`decay_steps` must be above `warmup_steps`, .* got 4 and 4",
    ),
    (warmup_cosine, (0.0, 1.0, 2, 4, None), TypeError, "`end_value` must be a number .* got NoneType"),
    (one_cycle, ("1", 4), TypeError, "`peak_value` must be a number .* got str"),
    (one_cycle, (1.0, 0), ValueError, "`transition_steps` must be above 0, got 0"),
    (one_cycle, (1.0, 4, 1.0), ValueError, "`pct_start` must be below 1, got 1.0"),
    (one_cycle, (1.0, 4, 0.5, 0), ValueError, "`div_factor` must be above 0, got 0"),
    (one_cycle, (1.0, 4, 0.5, 2.0, 2.0, "cosine"), ValueError, "`anneal_strategy` must be .* got 'cosine'"),
    (piecewise_constant_schedule, (None,), TypeError, "`init_value` must be a number .* got NoneType"),
    (piecewise_constant_schedule, (1.0, [2]), TypeError, "`boundaries_and_scales` must map .* got list"),
    (piecewise_constant_schedule, (1.0, {"2": 0.5}), TypeError, "must be a number, got str"),
    (
        piecewise_constant_schedule,
        (1.0, {2: -0.5}),
        ValueError,
        r"`boundaries_and_scales\[2\]` must be at least 0",
    ),
    (join_schedules, ([], []), ValueError, "`schedules` must hold at least one schedule"),
    (join_schedules, ([constant, 0.5], [1]), TypeError, r"`schedules\[1\]` must be callable, got float"),
    (join_schedules, ([constant] * 2, []), ValueError, "`boundaries` must be one fewer .* got 0 and 2"),
    (join_schedules, ([constant] * 2, ["1"]), TypeError, r"`boundaries\[0\]` must be a number, got str"),
    (join_schedules, ([constant] * 2, [-1]), ValueError, r"`boundaries\[0\]` must be at least 0, got -1"),
    (join_schedules, ([constant] * 3, [2, 2]), ValueError, r"`boundaries` must rise, got \[2, 2\]"),
]


@each_row(("function", "args", "error", "message"), BAD)
def test_bad_arguments_are_refused(function, args, error, message):
    with pytest.raises(error, match=message):
        function(*args)


def test_the_content_of_a_tensor_is_not_looked_at():
    assert polynomial_schedule(torch.tensor(math.nan), 0.0, torch.tensor(-1.0), 4)(0).isnan()
