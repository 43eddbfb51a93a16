"""Gradients → updates by Adamax: their running average over their largest recent absolute value."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

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
)
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.scale import scale_by_learning_rate

__all__ = ["ScaleByAdamaxState", "adamax", "scale_by_adamax"]


class ScaleByAdamaxState(NamedTuple):
    """The state of :func:`scale_by_adamax`; the names are those of ``torch.optim.Adamax``."""

    exp_avg: TensorTree
    """Running averages of the gradients: a tensor for each parameter, of its shape and dtype."""
    exp_inf: TensorTree
    """Their largest absolute values, which decay."""
    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each, on the CPU."""


@documented
def scale_by_adamax(
    b1: HyperParameter = 0.9,
    b2: HyperParameter = 0.999,
    eps: HyperParameter = 1e-6,
    moment_requires_grad: bool = False,
) -> GradientTransformation:
    """Adamax's direction ``m / (1 - b1**t) / u`` with ``u = max(b2 * u, |g| + eps)``.

    ``m`` is the running average of the gradients ``g``, ``t`` their number. [Kingma and Ba 2015, Adam: A Method for
    Stochastic Optimization, algorithm 2; ``eps`` as in ``torch.optim.Adamax``.]

    Args:
        b1: decay of the average; a number that is at least 0 and below 1, or a tensor of one element, which may
            require grad.
        b2: decay of the largest absolute value, with the range and types of ``b1``.
        eps: added to the absolute value, at least 0; a number or a tensor of one element.
        moment_requires_grad: leaves at the start.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_adamax()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 1.0000, -1.0000])
    """
    check_decay("b1", b1)
    check_decay("b2", b2)
    check_at_least_zero("eps", eps)
    return elementwise(ScaleByAdamaxState, partial(_formula, b1=b1, b2=b2, eps=eps), moment_requires_grad)


def _formula(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_infs: list[Tensor],
    steps: list[Tensor],
    *,
    b1: HyperParameter,
    b2: HyperParameter,
    eps: HyperParameter,
    inplace: bool,
) -> tuple[list[Tensor], ...]:
    steps = foreach.add_number(steps, 1, inplace=inplace)
    exp_avgs = foreach.interpolate(exp_avgs, grads, 1 - b1, inplace=inplace)
    decayed = foreach.multiply(exp_infs, b2, inplace=inplace)
    exp_infs = foreach.maximum(decayed, foreach.add_number(foreach.absolute(grads), eps))
    (correction,) = bias_correction.bias_corrections((b1,), steps)
    directions = foreach.multiply(foreach.divide(exp_avgs, exp_infs), foreach.inverse(correction))
    return directions, exp_avgs, exp_infs, steps


@documented
def adamax(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.999),
    eps: HyperParameter = 1e-6,
    weight_decay: HyperParameter = 0.0,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Adamax, as ``torch.optim.Adamax``: :func:`~torchopt_dist.transform.scale_by_adamax`, times the learning rate.

    [Kingma and Ba 2015, Adam: A Method for Stochastic Optimization, section 7.1.]

    Args:
        lr: learning rate.
        betas: decays of the running average of the gradients and of their largest absolute value, at least 0 and
            below 1; numbers or tensors of one element.
        eps: added to the absolute value, at least 0; a number or a tensor of one element.
        weight_decay: L2 penalty.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = adamax(lr=0.1)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.1000,  0.1000])
    """
    check_decays("betas", betas, 2)
    return chain(
        *penalized(weight_decay, maximize),
        scale_by_adamax(*betas, eps, moment_requires_grad),
        scale_by_learning_rate(lr),
    )
