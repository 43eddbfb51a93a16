"""Updates → the updates times a number, a tensor, or the value of a schedule.

A learning rate given as a tensor gets its exact gradient, to any order.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, PerLeaf, ScalarOrSchedule, Schedule, Updates
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_learning_rate,
    check_said,
    is_number,
    is_per_leaf,
    is_schedule,
    plain_rates,
    times_per_leaf,
)
from torchopt_dist.transform.base import EmptyState, GradientTransformation, of_elements, stateless

__all__ = ["ScaleByScheduleState", "learning_rate_of", "scale", "scale_by_learning_rate", "scale_by_schedule"]


class _Scale(GradientTransformation):
    """Updates times one number or tensor."""

    @property
    def constant_factor(self) -> float | None:
        if not isinstance(self.update, partial) or self.update.func is not _scale_update:
            return None
        step_size, sign = self.update.args
        return sign * step_size if is_number(step_size) else None


class ScaleByScheduleState(NamedTuple):
    """The state of :func:`scale_by_schedule`."""

    step: Tensor
    """Updates made so far: 0-d, int64, on the CPU."""


def scale(step_size: HyperParameter) -> GradientTransformation:
    """Multiply updates by a constant.

    Args:
        step_size: a number of either sign, or a tensor of one element, which may require grad.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale(-0.5)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-1.,  2.])
    """
    return _Scale(stateless, partial(_scale_update, step_size, 1.0))


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiply updates by the value of a schedule.

    Args:
        step_size_fn: the number of updates made so far → a factor. It is given a 0-d float64 tensor on the
            CPU, so that a schedule's arithmetic is exact enough for float64 parameters.

    Raises:
        TypeError: it is not callable.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_schedule(lambda count: 0.5**count)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 2., -4.])
    """
    if not callable(step_size_fn):
        raise TypeError(f"`step_size_fn` must be callable, got {type(step_size_fn).__name__}")
    return GradientTransformation(_schedule_init, partial(_schedule_update, step_size_fn, 1.0))


def scale_by_learning_rate(lr: ScalarOrSchedule) -> GradientTransformation:
    """Multiply updates by minus the learning rate: the last link of every optimizer's chain.

    Args:
        lr: a number, a tensor of one element, which may require grad, a schedule, or a tree of numbers and tensors, one
            for each parameter: of one element, or of a shape that broadcasts to the parameter's.

    Raises:
        TypeError: it is none of these.
        ValueError: it is a negative number, or a tensor of more than one element; from ``update``: a tree has another
            structure than the updates, or a tensor in it another shape than its update.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_learning_rate(0.5)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-1.,  2.])
    """
    check_learning_rate("lr", lr)
    if is_schedule(lr):
        return GradientTransformation(_schedule_init, partial(_schedule_update, lr, -1.0))
    return _Scale(stateless, partial(_scale_update, plain_rates(lr), -1.0))


def learning_rate_of(link: GradientTransformation) -> ScalarOrSchedule | None:
    """What :func:`scale_by_learning_rate` was given to make this link; ``None`` if it was not made by it."""
    update = link.update
    if (
        isinstance(update, partial)
        and update.func in (_scale_update, _schedule_update)
        and update.args[1] < 0
    ):
        lr: ScalarOrSchedule = update.args[0]
        return lr
    return None


@of_elements()
def _scale_update(
    step_size: HyperParameter | PerLeaf,
    sign: float,
    updates: Updates,
    state: EmptyState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    leaves, spec = pytree.flatten(updates)
    if is_per_leaf(step_size):
        return pytree.unflatten(spec, times_per_leaf(leaves, step_size, spec, "lr", sign)), state
    places = present(leaves)
    scaled = foreach.multiply(pick(leaves, places), sign * step_size)
    return pytree.unflatten(spec, put(leaves, places, scaled)), state


def _schedule_init(params: Params, /) -> ScaleByScheduleState:
    return ScaleByScheduleState(torch.zeros((), dtype=torch.int64, device="cpu"))


@of_elements()
def _schedule_update(
    schedule: Schedule,
    sign: float,
    updates: Updates,
    state: ScaleByScheduleState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    factor = check_said("lr" if sign < 0 else "step_size_fn", schedule(state.step.to(torch.float64)))
    updates, _ = _scale_update(factor, sign, updates, EmptyState())
    step = state.step.add_(1) if inplace and not torch.is_grad_enabled() else state.step + 1
    return updates, ScaleByScheduleState(step)
