"""Updates → their running average, perhaps corrected for its start at 0."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from torchopt_dist.core.types import TensorTree
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import elementwise
from torchopt_dist.transform._hyperparameters import HyperParameter, check_decay
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["EmaState", "ema"]


class EmaState(NamedTuple):
    """The state of :func:`ema`."""

    exp_avg: TensorTree
    """The running averages: a tensor for each parameter, of its shape and dtype."""
    step: TensorTree
    """How many updates each parameter has had: a 0-d float32 tensor each, on the CPU."""


def ema(
    decay: HyperParameter, debias: bool = True, moment_requires_grad: bool = False
) -> GradientTransformation:
    """The running average ``m = decay * m + (1 - decay) * u`` of the updates, by default over ``1 - decay**t``.

    Args:
        decay: a number that is at least 0 and below 1, or a tensor of one element, which may require grad.
        debias: correct for the average's start at 0, as Adam does.
        moment_requires_grad: make the initial averages leaves that require grad.

    Raises:
        TypeError: ``decay`` has the wrong type.
        ValueError: it is out of its range.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = ema(0.9)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 2., -4.])
    """
    check_decay("decay", decay)
    return elementwise(EmaState, partial(_formula, decay=decay, debias=bool(debias)), moment_requires_grad)


def _formula(
    updates: list[Tensor],
    averages: list[Tensor],
    steps: list[Tensor],
    *,
    decay: HyperParameter,
    debias: bool,
    inplace: bool,
) -> tuple[list[Tensor], ...]:
    averages = foreach.interpolate(averages, updates, 1 - decay, inplace=inplace)
    steps = foreach.add_number(steps, 1, inplace=inplace)
    if not debias:
        return [*averages], averages, steps
    (correction,) = bias_correction.bias_corrections((decay,), steps)
    return foreach.multiply(averages, foreach.inverse(correction)), averages, steps
