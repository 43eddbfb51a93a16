"""Gradients → gradients over the root of the running average of their squares, or over their standard deviation."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torchopt_dist.core.types import TensorTree
from torchopt_dist.ops._rmsprop import rmsprop
from torchopt_dist.transform._elementwise import elementwise, first_state
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_at_least_zero,
    check_decay,
    check_start,
)
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["ScaleByRmsState", "ScaleByStddevState", "scale_by_rms", "scale_by_stddev"]


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
        eps: added to the root, at least 0; a number or a tensor of one element. The root's derivative at 0 is taken
            to be 0, which is the limit as the gradient goes to 0.
        initial_scale: the average at the start, at least 0.
        moment_requires_grad: make the initial averages leaves that require grad.
        fused: ``None`` uses a kernel where there is one, ``False`` never uses one, ``True`` raises an error where there
            is none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
        RuntimeError: from ``update``: ``fused=True`` where there is no kernel; the message says why.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_rms()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 3.1623, -3.1623])
    """
    _check(alpha, eps, initial_scale)
    return elementwise(
        ScaleByRmsState,
        partial(first_state, ScaleByRmsState, moment_requires_grad, square_avg=initial_scale),
        partial(rmsprop, alpha=alpha, eps=eps, fused=fused),
    )


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
    _check(alpha, eps, initial_scale)
    return elementwise(
        ScaleByStddevState,
        partial(first_state, ScaleByStddevState, moment_requires_grad, square_avg=initial_scale),
        partial(rmsprop, alpha=alpha, eps=eps, fused=fused),
    )


def _check(alpha: HyperParameter, eps: HyperParameter, initial_scale: float) -> None:
    check_decay("alpha", alpha)
    check_at_least_zero("eps", eps)
    check_start("initial_scale", initial_scale)
