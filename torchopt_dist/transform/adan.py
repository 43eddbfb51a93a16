"""Gradients → updates by Adan: Adam with the running average of the gradients' change, as a look ahead."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import Numeric, Params, ScalarOrSchedule, Schedule, TensorTree
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import counts, elementwise, filled
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_at_least_zero,
    check_decay,
    check_decays,
    check_learning_rate,
    check_said,
    is_per_leaf,
    is_zero,
    plain_rates,
)
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights, penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.scale import scale, scale_by_learning_rate, scale_by_schedule

__all__ = ["ScaleByAdanState", "adan", "scale_by_adan"]


class ScaleByAdanState(NamedTuple):
    """The state of :func:`scale_by_adan`."""

    exp_avg: TensorTree
    """Running averages of the gradients: a tensor for each parameter, of its shape and dtype."""
    exp_avg_diff: TensorTree
    """Running averages of their changes."""
    exp_avg_sq: TensorTree
    """Running averages of the squares of the gradients that look ahead."""
    last_grad: TensorTree
    """The last gradients."""
    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each, on the CPU."""


@documented
def scale_by_adan(
    b1: HyperParameter = 0.98,
    b2: HyperParameter = 0.92,
    b3: HyperParameter = 0.99,
    eps: HyperParameter = 1e-8,
    moment_requires_grad: bool = False,
) -> GradientTransformation:
    """Adan's direction ``(m + b2 * d) / (sqrt(n) + eps)``.

    ``m``, ``d`` and ``n`` are the running averages of the gradient ``g``, of its change since the last one, ``c`` (0 at
    the first), and of ``(g + b2 * c)**2``, corrected for their start at 0. [Xie et al. 2024, Adan: Adaptive Nesterov
    Momentum Algorithm for Faster Optimizing Deep Models, algorithm 1; the decays are one minus the paper's.]

    Args:
        b1: decay of ``m``; a number that is at least 0 and below 1, or a tensor of one element, which may require
            grad.
        b2: decay of ``d``, with the range and types of ``b1``.
        b3: decay of ``n``, with the range and types of ``b1``.
        eps: added to the root.
        moment_requires_grad: leaves at the start.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_adan()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 1., -1.])
    """
    for name, decay in (("b1", b1), ("b2", b2), ("b3", b3)):
        check_decay(name, decay)
    check_at_least_zero("eps", eps)
    return elementwise(
        ScaleByAdanState,
        partial(_formula, b1=b1, b2=b2, b3=b3, eps=eps),
        first=partial(_init, moment_requires_grad),
    )


def _init(requires_grad: bool, params: Params, /) -> ScaleByAdanState:
    m, d, n = (filled(params, requires_grad=requires_grad) for _ in range(3))
    return ScaleByAdanState(m, d, n, filled(params), counts(params))


def _formula(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_diffs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    last_grads: list[Tensor],
    steps: list[Tensor],
    *,
    b1: HyperParameter,
    b2: HyperParameter,
    b3: HyperParameter,
    eps: HyperParameter,
    inplace: bool,
) -> tuple[list[Tensor], ...]:
    changed = foreach.combine(_changed, bias_correction.values(steps))
    steps = foreach.add_number(steps, 1, inplace=inplace)
    changes = foreach.multiply(foreach.add(grads, last_grads, -1.0), changed)
    ahead = foreach.add(grads, changes, b2)
    exp_avgs = foreach.interpolate(exp_avgs, grads, 1 - b1, inplace=inplace)
    exp_avg_diffs = foreach.interpolate(exp_avg_diffs, changes, 1 - b2, inplace=inplace)
    exp_avg_sqs = foreach.multiply(exp_avg_sqs, b3, inplace=inplace)
    exp_avg_sqs = foreach.add_product(exp_avg_sqs, ahead, ahead, 1 - b3, inplace=inplace)

    bias_correction1, bias_correction2, bias_correction3 = bias_correction.bias_corrections(
        (b1, b2, b3), steps
    )
    above = foreach.add(
        foreach.multiply(exp_avgs, foreach.inverse(bias_correction1)),
        foreach.multiply(exp_avg_diffs, foreach.combine(partial(_over, b2), bias_correction2)),
    )
    roots = foreach.multiply(
        foreach.square_root(exp_avg_sqs), foreach.combine(_inverse_root, bias_correction3)
    )
    moved = foreach.divide(above, foreach.add_number(roots, eps))
    last = [_own(g) for g in grads]
    return moved, exp_avgs, exp_avg_diffs, exp_avg_sqs, last, steps


def _own(grad: Tensor) -> Tensor:
    """A gradient for the state to keep: ``p.grad``, which ``zero_grad`` may overwrite, has no history."""
    if torch.compiler.is_compiling():  # which cannot see a node of a graph
        return grad.clone()
    return grad if torch.is_grad_enabled() and grad.grad_fn is not None else grad.clone()


def _changed(t: HyperParameter) -> HyperParameter:
    """1 if there was a gradient before, else 0."""
    return torch.where(t > 0, 1.0, 0.0).to(t.dtype) if isinstance(t, Tensor) else float(t > 0)


def _over(y: HyperParameter, x: HyperParameter) -> HyperParameter:
    return y / x


def _inverse_root(x: HyperParameter) -> HyperParameter:
    return x**-0.5


@documented
def adan(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter, HyperParameter] = (0.98, 0.92, 0.99),
    eps: HyperParameter = 1e-8,
    weight_decay: HyperParameter = 0.0,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Adan: ``(p - lr * d) / (1 + lr * weight_decay)``.

    ``d`` is the direction of :func:`~torchopt_dist.transform.scale_by_adan`.

    [Xie et al. 2024, Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models, algorithm 1.]

    Args:
        lr: learning rate.
        betas: decays of the running averages of the gradients, of their changes, and of the squares of the gradients
            that look ahead, at least 0 and below 1; numbers or tensors of one element.
        eps: added to the denominator.
        weight_decay: decoupled and proximal, at least 0; a number or a tensor of one element.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = adan(lr=0.1)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.1000,  0.1000])
    """
    check_decays("betas", betas, 3)
    check_learning_rate("lr", lr)
    check_at_least_zero("weight_decay", weight_decay)
    # (p - lr * d) / (1 + lr * w) is p less lr / (1 + lr * w) times d + w * p.
    if is_zero(weight_decay):
        last = scale_by_learning_rate(lr)
    elif is_per_leaf(lr):
        last = scale_by_learning_rate(_shrunk(lr, weight_decay))
    elif callable(lr):
        last = scale_by_schedule(partial(_factor_of_schedule, lr, weight_decay))
    else:
        last = scale(_factor(lr, weight_decay))
    return chain(
        *penalized(0.0, maximize),
        scale_by_adan(*betas, eps, moment_requires_grad),
        add_decayed_weights(weight_decay),
        last,
    )


def _shrunk(rates: Any, weight_decay: HyperParameter) -> Any:
    return pytree.tree_map(lambda lr: -_factor(lr, weight_decay), plain_rates(rates))


def _factor(lr: Numeric, weight_decay: HyperParameter) -> Numeric:
    return -lr / (1 + lr * weight_decay)


def _factor_of_schedule(lr: Schedule, weight_decay: HyperParameter, count: Numeric) -> Numeric:
    return _factor(check_said("lr", lr(count)), weight_decay)
