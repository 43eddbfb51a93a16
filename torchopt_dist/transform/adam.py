"""Gradients → updates by Adam and AdamW: their running average over the root of that of their squares."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torchopt_dist.core.types import ScalarOrSchedule, TensorTree
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._adam import adam as adam_op
from torchopt_dist.ops._adam import adam_
from torchopt_dist.transform._elementwise import elementwise
from torchopt_dist.transform._fused_step import fused_step
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_at_least_zero,
    check_decay,
    check_decays,
)
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights, penalized
from torchopt_dist.transform.base import ChainedGradientTransformation, GradientTransformation
from torchopt_dist.transform.masked import Mask
from torchopt_dist.transform.scale import scale_by_learning_rate

__all__ = ["ScaleByAdamState", "ScaleByAmsgradState", "adam", "adamw", "scale_by_adam"]


class ScaleByAdamState(NamedTuple):
    """The state of :func:`scale_by_adam`; the names are those of ``torch.optim.Adam``."""

    exp_avg: TensorTree
    """Running averages of the gradients: a tensor for each parameter, of its shape and dtype."""
    exp_avg_sq: TensorTree
    """Running averages of their squares."""
    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each, on the CPU."""


class ScaleByAmsgradState(NamedTuple):
    """The state of :func:`scale_by_adam` with ``amsgrad``; the names are those of ``torch.optim.Adam``."""

    exp_avg: TensorTree
    """As in :class:`ScaleByAdamState`; so are the next two."""
    exp_avg_sq: TensorTree
    max_exp_avg_sq: TensorTree
    """The greatest that ``exp_avg_sq`` has been: a tensor for each parameter, of its shape and dtype."""
    step: TensorTree


@documented
def scale_by_adam(
    b1: HyperParameter = 0.9,
    b2: HyperParameter = 0.999,
    eps: HyperParameter = 1e-8,
    eps_root: HyperParameter = 0.0,
    moment_requires_grad: bool = False,
    *,
    amsgrad: bool = False,
    fused: bool | None = None,
) -> GradientTransformation:
    """Adam's direction ``m / (sqrt(v + eps_root) + eps)``, ``m`` and ``v`` corrected for their start at 0.

    ``m`` and ``v`` are the running averages of the gradients and of their squares. [Kingma and Ba 2015, Adam: A
    Method for Stochastic Optimization, algorithm 1.] With ``amsgrad`` the greatest ``v`` so far stands
    for ``v``, and is corrected after it is found, as in ``torch.optim.Adam``. [Reddi, Kale and Kumar 2018, On the
    Convergence of Adam and Beyond, algorithm 2.]

    Args:
        b1: decay of the average of the gradients.
        b2: decay of the average of their squares, with the range and types of ``b1``.
        eps: added to the root, at least 0; a number or a tensor of one element.
        eps_root: added below the root, at least 0; a number or a tensor of one element. With 0, the root's derivative
            at 0 is taken to be 0, which is the limit as the gradient goes to 0.
        moment_requires_grad: leaves at the start.
        amsgrad: divide by the largest average of the squares so far.
        fused: whether a kernel runs.

    Raises:
        RuntimeError: ``fused=True`` with ``amsgrad``; from ``update``: where there is no kernel; the message says why.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_adam()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 1., -1.])
    """
    check_decay("b1", b1)
    check_decay("b2", b2)
    check_at_least_zero("eps", eps)
    check_at_least_zero("eps_root", eps_root)
    if amsgrad:
        if fused:
            raise RuntimeError(
                "`fused=True` cannot be used: there is no kernel for `amsgrad`; leave `fused` out"
            )
        return elementwise(
            ScaleByAmsgradState,
            partial(_amsgrad, b1=b1, b2=b2, eps=eps, eps_root=eps_root),
            moment_requires_grad,
        )
    return elementwise(
        ScaleByAdamState,
        partial(adam_op, b1=b1, b2=b2, eps=eps, eps_root=eps_root, fused=fused),
        moment_requires_grad,
    )


def _amsgrad(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    b1: HyperParameter,
    b2: HyperParameter,
    eps: HyperParameter,
    eps_root: HyperParameter,
    inplace: bool,
) -> tuple[list[Tensor], ...]:
    steps = foreach.add_number(steps, 1, inplace=inplace)
    exp_avgs = foreach.interpolate(exp_avgs, grads, 1 - b1, inplace=inplace)
    exp_avg_sqs = foreach.multiply(exp_avg_sqs, b2, inplace=inplace)
    exp_avg_sqs = foreach.add_product(exp_avg_sqs, grads, grads, 1 - b2, inplace=inplace)
    max_exp_avg_sqs = foreach.maximum(max_exp_avg_sqs, exp_avg_sqs, inplace=inplace)
    bias_correction1, bias_correction2 = bias_correction.bias_corrections((b1, b2), steps)
    below = foreach.multiply(max_exp_avg_sqs, foreach.inverse(bias_correction2))
    if not foreach.is_zero(eps_root):
        below = foreach.add_number(below, eps_root)
    below = foreach.add_number(foreach.square_root(below), eps)
    directions = foreach.multiply(foreach.divide(exp_avgs, below), foreach.inverse(bias_correction1))
    return directions, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps


@documented
def adam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.999),
    eps: HyperParameter = 1e-8,
    weight_decay: HyperParameter = 0.0,
    amsgrad: bool = False,
    *,
    eps_root: HyperParameter = 0.0,
    moment_requires_grad: bool = False,
    maximize: bool = False,
    fused: bool | None = None,
) -> GradientTransformation:
    """Adam, as ``torch.optim.Adam``: :func:`~torchopt_dist.transform.scale_by_adam`, times the learning rate.

    [Kingma and Ba 2015, Adam: A Method for Stochastic Optimization.]

    Args:
        lr: learning rate.
        betas: decays of the averages of the gradients and of their squares.
        eps: added to the denominator.
        weight_decay: L2 penalty.
        amsgrad: divide by the largest average of the squares so far.
        eps_root: added below the root of the denominator, at least 0; a number or a tensor of one element.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.
        fused: whether a kernel runs.

    Raises:
        RuntimeError: ``fused=True`` with ``amsgrad``; at a step: where there is no kernel; the message says why.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = adam(lr=0.1)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.1000,  0.1000])
    """
    return _chained(
        penalized(weight_decay, maximize),
        [],
        betas,
        lr=lr,
        eps=eps,
        eps_root=eps_root,
        weight_decay=weight_decay,
        maximize=maximize,
        fused=fused,
        amsgrad=amsgrad,
        moment_requires_grad=moment_requires_grad,
    )


@documented
def adamw(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.999),
    eps: HyperParameter = 1e-8,
    weight_decay: HyperParameter = 1e-2,
    amsgrad: bool = False,
    *,
    eps_root: HyperParameter = 0.0,
    mask: Mask = None,
    moment_requires_grad: bool = False,
    maximize: bool = False,
    fused: bool | None = None,
) -> GradientTransformation:
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``.

    ``p - lr * (d + weight_decay * p)``, where ``d`` is the direction of
    :func:`~torchopt_dist.transform.scale_by_adam`. [Loshchilov and Hutter 2019, Decoupled Weight Decay
    Regularization.]

    Args:
        lr: learning rate.
        betas: decays of the averages of the gradients and of their squares.
        eps: added to the denominator.
        weight_decay: ``lr`` times this part of a parameter is subtracted from it at each step; at least 0, a number or
            a tensor of one element.
        amsgrad: divide by the largest average of the squares so far.
        eps_root: added below the root of the denominator, at least 0; a number or a tensor of one element.
        mask: which parameters decay.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.
        fused: whether a kernel runs.

    Raises:
        RuntimeError: ``fused=True`` with ``amsgrad``; at a step: where there is no kernel; the message says why.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = adamw(lr=0.1, weight_decay=0.5)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.1500,  0.2000])
    """
    return _chained(
        penalized(0.0, maximize),
        [add_decayed_weights(weight_decay, mask)],
        betas,
        has_kernel=mask is None,
        lr=lr,
        eps=eps,
        eps_root=eps_root,
        weight_decay=weight_decay,
        decoupled=True,
        maximize=maximize,
        fused=fused,
        amsgrad=amsgrad,
        moment_requires_grad=moment_requires_grad,
    )


def _chained(
    before: list[GradientTransformation],
    after: list[GradientTransformation],
    betas: tuple[HyperParameter, HyperParameter],
    *,
    lr: ScalarOrSchedule,
    eps: HyperParameter,
    eps_root: HyperParameter,
    fused: bool | None,
    amsgrad: bool,
    moment_requires_grad: bool,
    has_kernel: bool = True,
    **decay: Any,
) -> GradientTransformation:
    check_decays("betas", betas, 2)
    b1, b2 = betas
    numbers: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "fused": fused}
    whole = None
    if has_kernel and not amsgrad:
        whole = fused_step(adam_, adam_op, ScaleByAdamState, lr=lr, **numbers, **decay)
    return ChainedGradientTransformation(
        *before,
        scale_by_adam(**numbers, moment_requires_grad=moment_requires_grad, amsgrad=amsgrad),
        *after,
        scale_by_learning_rate(lr),
        fused_step=whole,
    )
