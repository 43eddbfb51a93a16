"""Gradients → updates by RMSprop: gradients over the root of the running average of their squares."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torchopt_dist.core.types import ScalarOrSchedule, TensorTree
from torchopt_dist.ops._rmsprop import rmsprop as rmsprop_op
from torchopt_dist.ops._rmsprop import rmsprop_
from torchopt_dist.transform._elementwise import elementwise
from torchopt_dist.transform._fused_step import fused_step
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_at_least_zero,
    check_decay,
    check_start,
    is_number,
    is_zero,
)
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import ChainedGradientTransformation, GradientTransformation
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.trace import TraceState, check_momentum, trace

__all__ = ["ScaleByRmsState", "ScaleByStddevState", "rmsprop", "scale_by_rms", "scale_by_stddev"]


class ScaleByRmsState(NamedTuple):
    """The state of :func:`scale_by_rms`; the names are those of ``torch.optim.RMSprop``."""

    square_avg: TensorTree
    """Running averages of the squared gradients: a tensor for each parameter, of its shape and dtype."""


class ScaleByStddevState(NamedTuple):
    """The state of :func:`scale_by_stddev`; the names are those of ``torch.optim.RMSprop``."""

    square_avg: TensorTree
    """Running averages of the squared gradients: a tensor for each parameter, of its shape and dtype."""
    grad_avg: TensorTree
    """Running averages of the gradients."""


@documented
def scale_by_rms(
    alpha: HyperParameter = 0.9,
    eps: HyperParameter = 1e-8,
    initial_scale: float = 0.0,
    moment_requires_grad: bool = False,
    *,
    fused: bool | None = None,
) -> GradientTransformation:
    """RMSprop's direction ``g / (sqrt(v) + eps)`` with ``v = alpha * v + (1 - alpha) * g**2``, as in torch.

    [Tieleman and Hinton 2012, Neural Networks for Machine Learning, lecture 6.5.]

    Args:
        alpha: decay of the average; a number that is at least 0 and below 1, or a tensor of one element, which may
            require grad.
        eps: added to the root.
        initial_scale: the average at the start, at least 0.
        moment_requires_grad: leaves at the start.
        fused: whether a kernel runs.

    Raises:
        RuntimeError: from ``update``: ``fused=True`` where there is no kernel; the message says why.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_rms()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 3.1623, -3.1623])
    """
    return _scaled(ScaleByRmsState, alpha, eps, initial_scale, moment_requires_grad, fused)


@documented
def scale_by_stddev(
    alpha: HyperParameter = 0.9,
    eps: HyperParameter = 1e-8,
    initial_scale: float = 0.0,
    moment_requires_grad: bool = False,
    *,
    fused: bool | None = None,
) -> GradientTransformation:
    """As :func:`scale_by_rms`, over ``sqrt(v - m**2) + eps``, where ``m`` is the running average of the gradients.

    That is ``torch.optim.RMSprop(centered=True)``, but for a variance ``v - m**2`` that rounding makes negative, as it
    may where gradients stay the same: it is 0 here, and its root is not a number in torch. [Graves 2013, Generating
    Sequences With Recurrent Neural Networks, equations 38 to 45.]

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_stddev()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 3.3333, -3.3333])
    """
    return _scaled(ScaleByStddevState, alpha, eps, initial_scale, moment_requires_grad, fused)


def _scaled(
    state_type: type[tuple[Any, ...]],
    alpha: HyperParameter,
    eps: HyperParameter,
    initial_scale: float,
    moment_requires_grad: bool,
    fused: bool | None,
) -> GradientTransformation:
    check_decay("alpha", alpha)
    check_at_least_zero("eps", eps)
    check_start("initial_scale", initial_scale)
    formula = partial(rmsprop_op, alpha=alpha, eps=eps, fused=fused)
    return elementwise(state_type, formula, moment_requires_grad, square_avg=initial_scale)


@documented
def rmsprop(
    lr: ScalarOrSchedule = 1e-2,
    alpha: HyperParameter = 0.99,
    eps: HyperParameter = 1e-8,
    weight_decay: HyperParameter = 0.0,
    momentum: HyperParameter = 0.0,
    centered: bool = False,
    *,
    initial_scale: float = 0.0,
    nesterov: bool = False,
    moment_requires_grad: bool = False,
    maximize: bool = False,
    fused: bool | None = None,
) -> GradientTransformation:
    """RMSprop, as ``torch.optim.RMSprop``.

    :func:`~torchopt_dist.transform.scale_by_rms`, or :func:`~torchopt_dist.transform.scale_by_stddev` if centered;
    then :func:`~torchopt_dist.transform.trace`, if there is a momentum; times the learning rate. [Tieleman and Hinton
    2012, Neural Networks for Machine Learning, lecture 6.5.]

    Args:
        lr: learning rate.
        alpha: decay of the running average of the squared gradients, at least 0 and below 1; a number or a tensor of
            one element.
        eps: added to the denominator.
        weight_decay: L2 penalty.
        momentum: how much of the running sum of steps stays, at least 0; a number or a tensor of one element.
        centered: divide by the standard deviation of the gradients. A variance that rounding makes negative is 0, where
            torch's parameters become NaN.
        initial_scale: the average of the squared gradients at the start, at least 0.
        nesterov: look ahead along the running sum; needs a momentum.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.
        fused: whether a kernel runs.

    Raises:
        ValueError: ``nesterov`` comes without a momentum.
        RuntimeError: at a step: ``fused=True`` where there is no kernel; the message says why.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = rmsprop(lr=0.1, centered=True)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-1.0050,  1.0050])
    """
    check_momentum(momentum, 0.0, nesterov)
    scale_down = scale_by_stddev if centered else scale_by_rms
    penalty: dict[str, Any] = {"weight_decay": weight_decay, "maximize": maximize}
    whole = fused_step(
        partial(rmsprop_, **penalty) if is_number(weight_decay) else None,
        rmsprop_op if is_zero(weight_decay) and not maximize else None,
        ScaleByStddevState if centered else ScaleByRmsState,
        TraceState,
        lr=lr,
        alpha=alpha,
        eps=eps,
        momentum=momentum,
        nesterov=nesterov,
        fused=fused,
    )
    links = penalized(weight_decay, maximize)
    links.append(scale_down(alpha, eps, initial_scale, moment_requires_grad, fused=fused))
    if not is_zero(momentum):
        links.append(trace(momentum, 0.0, nesterov, moment_requires_grad))
    return ChainedGradientTransformation(*links, scale_by_learning_rate(lr), fused_step=whole)
