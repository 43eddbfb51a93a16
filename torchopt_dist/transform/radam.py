"""Gradients → updates by RAdam: momentum at first, and Adam once its denominator has a small enough variance."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist.core.types import ScalarOrSchedule, TensorTree
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import elementwise
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_at_least_zero,
    check_decay,
    check_decays,
    is_number,
)
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.scale import scale_by_learning_rate

__all__ = ["ScaleByRAdamState", "radam", "scale_by_radam"]


TRUSTED = 5.0
"""The length of the average from which on the denominator is used, as in ``torch.optim.RAdam``."""


class ScaleByRAdamState(NamedTuple):
    """The state of :func:`scale_by_radam`; the names are those of ``torch.optim.RAdam``."""

    exp_avg: TensorTree
    """Running averages of the gradients: a tensor for each parameter, of its shape and dtype."""
    exp_avg_sq: TensorTree
    """Running averages of their squares."""
    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each, on the CPU."""


@documented
def scale_by_radam(
    b1: HyperParameter = 0.9,
    b2: HyperParameter = 0.999,
    eps: HyperParameter = 1e-6,
    moment_requires_grad: bool = False,
) -> GradientTransformation:
    """RAdam's direction: ``m / (1 - b1**t)``, later also times ``r * sqrt(1 - b2**t) / (sqrt(v) + eps)``.

    ``m`` and ``v`` are the running averages of the gradients and of their squares, ``t`` their number. The second
    factor is used once the effective length of the average ``v`` is more than 5 gradients; ``r`` then corrects for its
    variance. [Liu et al. 2020, On the Variance of the Adaptive Learning Rate and Beyond, algorithm 2; 5 for the paper's
    4, and ``eps``, as in ``torch.optim.RAdam``.]

    Args:
        b1: decay of the average of the gradients.
        b2: decay of the average of their squares, with the range and types of ``b1``.
        eps: added to the root.
        moment_requires_grad: leaves at the start.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_radam()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 2., -4.])
    """
    check_decay("b1", b1)
    check_decay("b2", b2)
    check_at_least_zero("eps", eps)
    return elementwise(ScaleByRAdamState, partial(_formula, b1=b1, b2=b2, eps=eps), moment_requires_grad)


def _formula(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    b1: HyperParameter,
    b2: HyperParameter,
    eps: HyperParameter,
    inplace: bool,
) -> tuple[list[Tensor], ...]:
    steps = foreach.add_number(steps, 1, inplace=inplace)
    exp_avgs = foreach.interpolate(exp_avgs, grads, 1 - b1, inplace=inplace)
    exp_avg_sqs = foreach.multiply(exp_avg_sqs, b2, inplace=inplace)
    exp_avg_sqs = foreach.add_product(exp_avg_sqs, grads, grads, 1 - b2, inplace=inplace)
    bias_correction1, bias_correction2 = bias_correction.bias_corrections((b1, b2), steps)
    t = bias_correction.values(steps)
    plain = foreach.combine(partial(_plain, b2), t, bias_correction1, bias_correction2)
    adaptive = foreach.combine(partial(_adaptive, b2), t, bias_correction1, bias_correction2)
    if is_number(adaptive) and adaptive == 0:
        return foreach.multiply(exp_avgs, plain), exp_avgs, exp_avg_sqs, steps
    below = foreach.add_number(foreach.square_root(exp_avg_sqs), eps)
    moved = foreach.multiply(foreach.divide(exp_avgs, below), adaptive)
    if not (is_number(plain) and plain == 0):
        moved = foreach.add(moved, foreach.multiply(exp_avgs, plain))
    return moved, exp_avgs, exp_avg_sqs, steps


def _length(b2: HyperParameter, t: HyperParameter, bias_correction2: HyperParameter) -> HyperParameter:
    """How many gradients the average ``v`` is over: ``rho_t`` of the paper."""
    return 2 / (1 - b2) - 1 - 2 * t * (1 - bias_correction2) / bias_correction2


def _plain(
    b2: HyperParameter, t: HyperParameter, bias_correction1: HyperParameter, bias_correction2: HyperParameter
) -> HyperParameter:
    """The factor of the average by itself: 0 as soon as the denominator is used."""
    length = _length(b2, t, bias_correction2)
    if isinstance(length, Tensor):
        return torch.where(length > TRUSTED, 0.0, 1 / bias_correction1)
    return 0.0 if length > TRUSTED else 1 / bias_correction1


def _adaptive(
    b2: HyperParameter, t: HyperParameter, bias_correction1: HyperParameter, bias_correction2: HyperParameter
) -> HyperParameter:
    """The factor of the average over its denominator: 0 until the denominator is used."""
    length, longest = _length(b2, t, bias_correction2), 2 / (1 - b2) - 1
    trusted = length > TRUSTED
    if isinstance(trusted, Tensor):  # what is not taken must be finite, or its derivative is none
        length, longest = (
            torch.where(trusted, length, 2 * TRUSTED),
            torch.where(trusted, longest, 2 * TRUSTED),
        )
    elif not trusted:
        return 0.0
    above = (length - 4) * (length - 2) * longest
    factor = (above / ((longest - 4) * (longest - 2) * length) * bias_correction2) ** 0.5 / bias_correction1
    return torch.where(trusted, factor, 0.0) if isinstance(trusted, Tensor) else factor


@documented
def radam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.999),
    eps: HyperParameter = 1e-6,
    weight_decay: HyperParameter = 0.0,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """RAdam, as ``torch.optim.RAdam``: :func:`~torchopt_dist.transform.scale_by_radam`, times the learning rate.

    [Liu et al. 2020, On the Variance of the Adaptive Learning Rate and Beyond.]

    Args:
        lr: learning rate.
        betas: decays of the averages of the gradients and of their squares.
        eps: added to the denominator.
        weight_decay: L2 penalty.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = radam(lr=0.1)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.2000,  0.4000])
    """
    check_decays("betas", betas, 2)
    return chain(
        *penalized(weight_decay, maximize),
        scale_by_radam(*betas, eps, moment_requires_grad),
        scale_by_learning_rate(lr),
    )
