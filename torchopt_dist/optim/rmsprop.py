"""Gradients → updates by RMSprop, as a function and as two classes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from torchopt_dist.arguments.options import hinted
from torchopt_dist.core.types import ScalarOrSchedule
from torchopt_dist.ops._rmsprop import rmsprop as rmsprop_op
from torchopt_dist.ops._rmsprop import rmsprop_
from torchopt_dist.optim._signatures import arguments_of
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.transform._fused_step import fused_step
from torchopt_dist.transform._hyperparameters import HyperParameter, is_number, is_zero
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import ChainedGradientTransformation, GradientTransformation
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.scale_by_rms import (
    ScaleByRmsState,
    ScaleByStddevState,
    scale_by_rms,
    scale_by_stddev,
)
from torchopt_dist.transform.trace import TraceState, check_momentum, trace

__all__ = ["MetaRMSprop", "RMSprop", "rmsprop"]


@hinted
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
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        alpha: decay of the running average of the squared gradients, at least 0 and below 1; a number or a tensor of
            one element.
        eps: added to the denominator, at least 0; a number or a tensor of one element.
        weight_decay: how much of a parameter is added to its gradient (L2 penalty), at least 0; a number or a tensor of
            one element.
        momentum: how much of the running sum of steps stays, at least 0; a number or a tensor of one element.
        centered: divide by the standard deviation of the gradients. A variance that rounding makes negative is 0, where
            torch's parameters become NaN.
        initial_scale: the average of the squared gradients at the start, at least 0.
        nesterov: look ahead along the running sum; needs a momentum.
        moment_requires_grad: make the initial averages leaves that require grad.
        maximize: maximize the objective.
        fused: ``None`` uses a kernel where there is one, ``False`` never uses one, ``True`` raises an error where there
            is none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, a tensor has more than one element, or ``nesterov`` comes without a
            momentum.
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


class RMSprop(Optimizer, transformation=rmsprop):
    """RMSprop in place, as ``torch.optim.RMSprop``."""

    _counts_for_torch = True

    @arguments_of(rmsprop)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaRMSprop(MetaOptimizer, transformation=rmsprop):
    """RMSprop that one can differentiate through."""

    @arguments_of(rmsprop)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
