"""Step count → value that is multiplied by a factor at each of some steps, and constant in between."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from torchopt_dist.core.types import Numeric, Schedule
from torchopt_dist.schedule._numeric import scalar, where
from torchopt_dist.schedule._validation import check_steps, check_value

__all__ = ["piecewise_constant_schedule"]


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
